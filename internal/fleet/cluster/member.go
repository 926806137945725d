package cluster

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ErrNameInUse means that another process uses this node's name.
var ErrNameInUse = errors.New("another process uses this node's name")

// Keeper keeps partitions. Its methods do not block. The member's goroutine calls them.
type Keeper interface {
	// Keep sets the partitions to keep from now on. The keeper restores and serves new partitions, and drops the
	// others. Keep is called after each look, also without a change.
	Keep(set Set)

	// Advertisement returns the current service. The keeper must not change the result afterwards.
	Advertisement() Advertisement

	// ModelsChanged returns a channel with a value for every possible addition to the models in Advertisement.
	ModelsChanged() <-chan struct{}
}

// MemberConfig configures a [Member].
type MemberConfig struct {
	Config                         // Session must be unique among all processes
	Namespace *jetstream.Namespace // carries messages that cannot wait for a heartbeat
	Bucket    *jetstream.Bucket    // bucket of nodes
	Keeper    Keeper

	// Drain is the maximum time that a leaving member waits until other nodes have the partitions; default
	// [DefaultDrain].
	Drain time.Duration

	// Dead, if not nil, reports whether the process of another session has certainly ended. It overrides the record.
	Dead func(session string) bool

	Views *Views // receives each new view; nil: the member has its own Views

	// Recreate, if not nil, recreates a deleted bucket.
	Recreate func(context.Context) error

	Log *slog.Logger // nil: nothing is logged
}

// Views has the current view of a member, for components from before the member. Views is safe for concurrent use.
type Views struct{ now atomic.Pointer[View] }

// NewViews returns the view of a member without other nodes.
func NewViews(cfg Config) *Views {
	v := &Views{}
	v.now.Store(New(cfg).View())
	return v
}

// Now returns the current view.
func (v *Views) Now() *View { return v.now.Load() }

// Member keeps a node's record, reads the other records, and passes the machine's decisions to the keeper.
type Member struct {
	cfg      MemberConfig
	machine  *Machine
	key      string
	revision uint64
	rival    *rival // nil: the last write found no rival
	views    *Views
	asked    chan chan struct{} // of Announce: closed after the write of the record
	reported reported
}

// rival is the record of another session in place of this node's record. Only a change of the
// record proves a running process.
type rival struct {
	session  string
	revision uint64
	silence  silence
}

// readRecord decodes an entry of the bucket of nodes. It returns false for an entry that no node wrote under the key.
func readRecord(e *jetstream.Entry) (r Record, ok bool) {
	if strictjson.Unmarshal(e.Value, &r) != nil || r.Session == "" {
		return Record{}, false
	}
	key, err := jetstream.EscapeToken(r.Node)
	return r, err == nil && key == e.Key
}

// DefaultDrain is the default of MemberConfig.Drain.
const DefaultDrain = 20 * time.Second

// Join claims the node's name. If another process has a record with a running heartbeat, the error wraps
// [ErrNameInUse]. Join takes over a record that does not change for DeadAfter, by compare-and-set; pauses of this
// process do not count. Later writes of the other process fail, and end it. An unreadable record proves nothing: a live
// process writes the record again.
func Join(ctx context.Context, cfg MemberConfig) (*Member, error) {
	if cfg.Drain <= 0 {
		cfg.Drain = DefaultDrain
	}
	key, err := jetstream.EscapeToken(cfg.Node)
	if err != nil {
		return nil, fmt.Errorf("node name: %w", err)
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	m := &Member{cfg: cfg, machine: New(cfg.Config), key: key, views: cfg.Views, asked: make(chan chan struct{})}
	if m.views == nil {
		m.views = NewViews(cfg.Config)
	}
	if cfg.Dead != nil {
		m.removeDead(ctx)
	}
	tick := time.NewTicker(cfg.Heartbeat)
	defer tick.Stop()
	var first *jetstream.Entry
	for silent := (silence{at: time.Now()}); ; {
		entry, err := cfg.Bucket.Latest(ctx, key)
		switch {
		case errors.Is(err, jetstream.ErrNotFound):
			return m, m.begin(ctx)
		case err != nil:
			return nil, fmt.Errorf("look for other processes with the name %s: %w", cfg.Node, err)
		case m.dead(&entry):
			m.revision = entry.Revision
			return m, m.begin(ctx)
		case first == nil:
			first = &entry
			cfg.Log.Info("a node with this name has a record; waiting to see whether it is alive", "node", cfg.Node,
				"for", cfg.DeadAfter)
		case entry.Revision < first.Revision: // the bucket was restored from an earlier state
			first, silent = &entry, silence{at: time.Now()}
		case entry.Revision != first.Revision && !readable(&entry):
			first = &entry
		case entry.Revision != first.Revision:
			return nil, fmt.Errorf("node %s: %w, and it is alive: choose another --node-id", cfg.Node, ErrNameInUse)
		case silent.extend(time.Now(), cfg.Heartbeat) > cfg.DeadAfter:
			m.revision = entry.Revision
			return m, m.begin(ctx)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// readable reports whether an entry of the bucket of nodes is a record.
func readable(e *jetstream.Entry) bool {
	_, ok := readRecord(e)
	return ok
}

// dead reports whether the process of a record has certainly ended.
func (m *Member) dead(e *jetstream.Entry) bool {
	r, ok := readRecord(e)
	return ok && m.cfg.Dead != nil && m.cfg.Dead(r.Session)
}

// removeDead removes the records under other names if the processes have certainly ended. Records left by an
// error expire: the servers of a new NATS cluster may not serve the bucket yet.
func (m *Member) removeDead(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	entries, err := m.cfg.Bucket.All(ctx)
	if err != nil {
		return
	}
	for _, e := range entries {
		if e.Key != m.key && m.dead(&e) {
			_, _ = m.cfg.Bucket.Sweep(ctx, "", func(key string) bool { return key != e.Key }, e.Revision+1)
		}
	}
}

// silence measures the time without a change of a record. Between two distant looks, both processes may have been
// paused: such an interval counts as two heartbeats, as in [Machine].
type silence struct {
	at     time.Time // of the last look
	lasted time.Duration
}

// extend adds a look and returns the length of the silence.
func (s *silence) extend(now time.Time, heartbeat time.Duration) time.Duration {
	s.lasted += min(now.Sub(s.at), 2*heartbeat)
	s.at = now
	return s.lasted
}

// begin claims the name. Run repeats a failed write, or fails for the same reason.
func (m *Member) begin(ctx context.Context) error {
	if err := m.write(ctx, Advertisement{}, false); errors.Is(err, ErrNameInUse) {
		return err
	}
	return ctx.Err()
}

// View returns the current view. It is safe for concurrent use.
func (m *Member) View() *View { return m.views.Now() }

// write writes the node's record once. An error that wraps ErrNameInUse is final.
func (m *Member) write(ctx context.Context, s Advertisement, leave bool) error {
	text, err := json.Marshal(m.machine.Announce(s, leave))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	revision, err := m.cfg.Bucket.Commit(ctx, nil, jetstream.Value{Key: m.key, Data: text}, m.revision)
	if err == nil {
		m.revision, m.rival = revision, nil
		return nil
	}
	if !errors.Is(err, jetstream.ErrConflict) {
		return err
	}
	entry, lastErr := m.cfg.Bucket.Latest(ctx, m.key)
	there, ok := readRecord(&entry)
	switch {
	case errors.Is(lastErr, jetstream.ErrNotFound): // the record has expired, or another process has removed it
		m.revision = entry.Revision
	case lastErr != nil:
		return lastErr
	case !ok:
		m.revision = entry.Revision
		err = fmt.Errorf("node %s: the record in bucket %s is unreadable: %w", m.cfg.Node, m.cfg.Bucket.Name(), err)
		m.cfg.Log.Warn("this node's record cannot be read; it is written again", "error", err, "what_to_do",
			"let only nodes write to the bucket of nodes: indexer auth create prints the permissions of each user")
	case there.Session == m.cfg.Session: // a late write of this member
		m.revision = entry.Revision
	case entry.Revision < m.revision:
		// The bucket was restored from an earlier state. The writer of this record has lost the name since.
		m.revision = entry.Revision
	default:
		return m.contest(&entry, there.Session, err)
	}
	return err
}

// contest handles another session's record in place of this node's record. The error wraps [ErrNameInUse] if the record
// has changed since the last write, because its process is then alive. The next write overwrites a record that does not
// change for DeadAfter.
func (m *Member) contest(e *jetstream.Entry, session string, err error) error {
	switch r := m.rival; {
	case r == nil || r.session != session:
		m.rival = &rival{session: session, revision: e.Revision, silence: silence{at: time.Now()}}
	case r.revision != e.Revision:
		return fmt.Errorf("node %s: %w", m.cfg.Node, ErrNameInUse)
	case r.silence.extend(time.Now(), m.cfg.Heartbeat) > m.cfg.DeadAfter:
		m.revision, m.rival = e.Revision, nil
	}
	return fmt.Errorf("node %s: the record in bucket %s belongs to another session; this node ends if the record changes: %w",
		m.cfg.Node, m.cfg.Bucket.Name(), err)
}

// readRecords reads all records.
func (m *Member) readRecords(ctx context.Context, acked uint64) (*Look, error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	entries, err := m.cfg.Bucket.All(ctx)
	if err != nil {
		return nil, err
	}
	look := &Look{}
	if m.machine.Releasing() {
		look.After = acked
	}
	for _, e := range entries {
		if m.machine.Releasing() {
			if e, err = m.cfg.Bucket.Latest(ctx, e.Key); errors.Is(err, jetstream.ErrNotFound) {
				continue
			} else if err != nil {
				return nil, err
			}
		}
		if r, ok := readRecord(&e); ok {
			look.Records = append(look.Records, Seen{Record: r, Revision: e.Revision})
		} else if e.Key != m.key {
			look.Unreadable = append(look.Unreadable, e.Key)
		}
	}
	return look, nil
}

// soonest is the minimum time between two writes outside of the heartbeat.
const soonest = 100 * time.Millisecond

// broadcast sends the written record to the other nodes. A node without the copy reads the record after a heartbeat.
func (m *Member) broadcast() {
	text, err := json.Marshal(Seen{Record: m.machine.announced, Revision: m.revision})
	if err == nil {
		// fails only without a connection
		_ = m.cfg.Namespace.Conn().Send(jetstream.Names(m.cfg.Namespace.Name()).Nodes(), "", text)
	}
}

func (m *Member) receive(text []byte) {
	var s Seen
	if strictjson.Unmarshal(text, &s) == nil && m.machine.Receive(s) {
		m.show()
	}
}

// show publishes a view of the current state.
func (m *Member) show() *View {
	view := m.machine.View()
	m.views.now.Store(view)
	m.reportView(view)
	return view
}

// Announce makes Run write the keeper's current service without a wait for the next heartbeat. It returns after the
// write, or when ctx is done. It is safe for concurrent use.
func (m *Member) Announce(ctx context.Context) {
	done := make(chan struct{})
	select {
	case m.asked <- done:
	case <-ctx.Done():
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// Run keeps the node a member until ctx is done. Run then waits until other nodes have the partitions, for Drain, or
// until the connection closes. The error wraps [ErrNameInUse] if another process claimed the name.
func (m *Member) Run(ctx context.Context) error {
	working := context.WithoutCancel(ctx)
	begun, acked := time.Now(), uint64(0)
	tick := time.NewTicker(m.cfg.Heartbeat)
	defer tick.Stop()
	messages, unsubscribe := m.subscribe()
	defer unsubscribe()
	var drained <-chan time.Time
	troubled := false
	var asked chan struct{} // of a waiting caller of Announce
	for {
		leave := ctx.Err() != nil
		if leave && m.cfg.Host { // no node has NATS without this process
			if !troubled {
				m.remove(working) // the next process finds the removed record, and does not wait
			}
			return nil
		}
		if leave && drained == nil {
			drained = time.After(m.cfg.Drain)
		}
		advertised := m.cfg.Keeper.Advertisement()
		news, wrote := m.machine.MustAnnounce(advertised), time.Now()
		err := m.write(working, advertised, leave)
		if errors.Is(err, ErrNameInUse) {
			return err
		}
		if leave && m.cfg.Namespace.Conn().Closed() {
			return nil // the record stays; the other nodes detect the silence
		}
		var look *Look
		if err == nil {
			if acked = m.machine.heartbeat; news {
				m.broadcast()
			}
		}
		if err == nil || m.cfg.Host {
			var unread error
			look, unread = m.readRecords(working, acked)
			err = errors.Join(err, unread)
		}
		m.reportTrouble(err)
		if err != nil {
			m.recreate(working)
		}
		troubled = err != nil
		m.machine.Step(time.Since(begun), acked, look)
		if view := m.show(); view.GraceOver {
			m.cfg.Keeper.Keep(view.Owned)
		}
		if asked != nil {
			close(asked)
			asked = nil
		}
		if leave && m.machine.Drained() {
			m.remove(working)
			return nil
		}
		next := due{tick.C, messages, ctx.Done(), drained}
		if leave {
			next.ended = nil
		}
		var expired bool
		if asked, expired = m.wait(next, wrote); expired {
			m.remove(working)
			return nil
		}
	}
}

// subscribe receives messages of other members. The subscription reaches the server before the first look, so no
// message after the look is lost. The caller calls unsubscribe once.
func (m *Member) subscribe() (messages <-chan []byte, unsubscribe func()) {
	received, over := make(chan []byte), make(chan struct{})
	end, err := m.cfg.Namespace.Conn().Subscribe(jetstream.Names(m.cfg.Namespace.Name()).Nodes(),
		func(r jetstream.Request) {
			select {
			case received <- r.Body:
			case <-over:
			}
		})
	return received, func() {
		close(over)
		if err == nil { // else the connection is closed
			end()
		}
	}
}

// due has the channels that end the wait between two steps of a member. nil channels end nothing.
type due struct {
	tick     <-chan time.Time
	messages <-chan []byte // of other members; a message does not end the wait
	ended    <-chan struct{}
	drained  <-chan time.Time // the end of Drain
}

// wait receives messages of other members until the next step. wrote is the time of the last record. asked is not nil
// if a caller of Announce waits for the end of the step. expired means that Drain has passed.
func (m *Member) wait(d due, wrote time.Time) (asked chan struct{}, expired bool) {
	var early <-chan time.Time
	for {
		select {
		case <-m.cfg.Keeper.ModelsChanged():
			if early == nil && m.machine.MustAnnounce(m.cfg.Keeper.Advertisement()) {
				early = time.After(soonest - time.Since(wrote))
			}
		case text := <-d.messages:
			m.receive(text)
		case asked = <-m.asked:
			return asked, false
		case <-d.tick:
			return nil, false
		case <-early:
			return nil, false
		case <-d.ended:
			return nil, false
		case <-d.drained:
			return nil, true
		}
	}
}

// recreate recreates a deleted bucket. All live nodes write their records again.
func (m *Member) recreate(ctx context.Context) {
	if m.cfg.Recreate == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	m.cfg.Bucket.RecreateIfGone(ctx, m.cfg.Recreate, m.cfg.Log, "nodes")
}

// remove deletes the record, so other nodes need not detect the end of this node. If NATS does not answer within
// DeadAfter, the record stays, and the other nodes detect the end.
func (m *Member) remove(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	_, err := m.cfg.Bucket.Sweep(ctx, "", func(key string) bool { return key != m.key }, m.revision+1)
	if err != nil {
		m.cfg.Log.Warn("this node's record is not removed; other nodes detect the end of this node", "error", err)
	}
}
