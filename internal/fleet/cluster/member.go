package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ErrNameInUse says that another process runs under this node's name.
var ErrNameInUse = errors.New("another process has this node's name")

// Keeper is what keeps partitions. Its methods return at once and are called from the member's goroutine.
type Keeper interface {
	// Keep says which partitions are to be kept from now on. The keeper restores and serves new ones, and drops those
	// that are no longer in the set. It is called after each look, changed or not.
	Keep(set Set)

	// Advertisement is what is served now. The keeper does not change it afterwards.
	Advertisement() Advertisement

	// ModelsChanged receives a value when the models in Advertisement may have become more.
	ModelsChanged() <-chan struct{}
}

// MemberConfig is one member's.
type MemberConfig struct {
	Config                         // Session must differ from that of any other process
	Namespace *jetstream.Namespace // where members send what cannot wait
	Bucket    *jetstream.Bucket    // of nodes
	Keeper    Keeper

	// Drain bounds how long a member that ends waits until other nodes have acquired what it has; default 20 s.
	Drain time.Duration

	// Dead, if not nil, reports whether the process of another session is known to have ended, whatever its record
	// says.
	Dead func(session string) bool

	// Waiting, if not nil, is called once if Join must wait to see whether another process runs under this name.
	Waiting func()

	Views *Views // where each new view is put; nil: in Views of the member's own

	// Viewed, if not nil, is called with each new view, from the goroutine of Run.
	Viewed func(*View)

	// Recreate, if not nil, creates the bucket again; it is called when the bucket was deleted. Recreated, if not nil,
	// is called with its result.
	Recreate  func(context.Context) error
	Recreated func(error)

	// Unreadable, if not nil, is called when the member's record has been found unreadable; it is written again.
	Unreadable func(error)

	// Trouble, if not nil, is called with what keeps other nodes from hearing this member; with nil when they hear it
	// again.
	Trouble func(error)
}

// Views is what a member knows, for those who are made before it. Any goroutine may use it.
type Views struct{ now atomic.Pointer[View] }

// NewViews returns the view of a member that knows nobody yet.
func NewViews(cfg Config) *Views {
	v := &Views{}
	v.now.Store(New(cfg).View())
	return v
}

// Now returns what is known now.
func (v *Views) Now() *View { return v.now.Load() }

// Member keeps one node's record, reads the others', and has the keeper carry out what the machine decides.
type Member struct {
	cfg      MemberConfig
	machine  *Machine
	key      string
	revision uint64
	rival    *rival // nil: the last write found none
	views    *Views
	asked    chan chan struct{} // of Announce: closed when the record has been written
}

// rival is another session's record, found where this node's own should be. Only a record that changes proves that its
// process lives.
type rival struct {
	session  string
	revision uint64
	silence  silence
}

// readRecord decodes an entry of the bucket of nodes. It reports false for an entry that no node wrote under this key.
func readRecord(e *jetstream.Entry) (r Record, ok bool) {
	if strictjson.Unmarshal(e.Value, &r) != nil || r.Session == "" {
		return Record{}, false
	}
	key, err := jetstream.EscapeToken(r.Node)
	return r, err == nil && key == e.Key
}

// Join claims the node's name. If there is a record of another process and its heartbeat goes on, the error wraps
// [ErrNameInUse]. A record that does not change for DeadAfter, while this process is not paused, is taken over by
// compare-and-set. What that process writes afterwards fails, and ends it. A record that cannot be read proves nothing:
// its process writes it again if it lives.
func Join(ctx context.Context, cfg MemberConfig) (*Member, error) {
	if cfg.Drain <= 0 {
		cfg.Drain = 20 * time.Second
	}
	key, err := jetstream.EscapeToken(cfg.Node)
	if err != nil {
		return nil, fmt.Errorf("node name: %w", err)
	}
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
			return nil, fmt.Errorf("look for other processes named %s: %w", cfg.Node, err)
		case m.dead(&entry):
			m.revision = entry.Revision
			return m, m.begin(ctx)
		case first == nil:
			if first = &entry; cfg.Waiting != nil {
				cfg.Waiting()
			}
		case entry.Revision < first.Revision: // the bucket was restored from an earlier time
			first, silent = &entry, silence{at: time.Now()}
		case entry.Revision != first.Revision && !readable(&entry):
			first = &entry
		case entry.Revision != first.Revision:
			return nil, fmt.Errorf("node %s: %w, and it lives: choose another --node-id", cfg.Node, ErrNameInUse)
		case silent.heard(time.Now(), cfg.Heartbeat) > cfg.DeadAfter:
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

// dead reports whether a record is of a process that is known to have ended.
func (m *Member) dead(e *jetstream.Entry) bool {
	r, ok := readRecord(e)
	return ok && m.cfg.Dead != nil && m.cfg.Dead(r.Session)
}

// removeDead removes the records of other names whose processes are known to have ended. What cannot be read or removed
// now expires: servers of NATS that have just found each other may not serve the bucket yet.
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

// silence measures for how long a record has not changed. Between two looks that are far apart this process may have
// been paused, and the other one with it: that counts as two heartbeats, as for [Machine].
type silence struct {
	at     time.Time // of the last look
	lasted time.Duration
}

// heard adds a look, and returns how long the silence has lasted.
func (s *silence) heard(now time.Time, heartbeat time.Duration) time.Duration {
	s.lasted += min(now.Sub(s.at), 2*heartbeat)
	s.at = now
	return s.lasted
}

// begin claims the name. What cannot be written now is written by Run, or Run fails for the same reason.
func (m *Member) begin(ctx context.Context) error {
	if err := m.write(ctx, Advertisement{}, false); errors.Is(err, ErrNameInUse) {
		return err
	}
	return ctx.Err()
}

// View returns what is known now. Any goroutine may call it.
func (m *Member) View() *View { return m.views.Now() }

// write announces the node, once. An error that wraps ErrNameInUse is the end.
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
	case errors.Is(lastErr, jetstream.ErrNotFound): // it has expired, or another process has removed it
		m.revision = entry.Revision
	case lastErr != nil:
		return lastErr
	case !ok:
		m.revision = entry.Revision
		err = fmt.Errorf("node %s: its record in bucket %s cannot be read: %w", m.cfg.Node, m.cfg.Bucket.Name(), err)
		if m.cfg.Unreadable != nil {
			m.cfg.Unreadable(err)
		}
	case there.Session == m.cfg.Session: // a late write of ours
		m.revision = entry.Revision
	case entry.Revision < m.revision:
		// The bucket was restored from an earlier time; the writer of this has lost the name since.
		m.revision = entry.Revision
	default:
		return m.contest(&entry, there.Session, err)
	}
	return err
}

// contest handles another session's record in place of this node's own. The error wraps [ErrNameInUse] if the record
// has changed since the last write, which proves that its process lives. A record that does not change for DeadAfter is
// overwritten by the next write.
func (m *Member) contest(e *jetstream.Entry, session string, err error) error {
	switch r := m.rival; {
	case r == nil || r.session != session:
		m.rival = &rival{session: session, revision: e.Revision, silence: silence{at: time.Now()}}
	case r.revision != e.Revision:
		return fmt.Errorf("node %s: %w", m.cfg.Node, ErrNameInUse)
	case r.silence.heard(time.Now(), m.cfg.Heartbeat) > m.cfg.DeadAfter:
		m.revision, m.rival = e.Revision, nil
	}
	return fmt.Errorf("node %s: its record in bucket %s is another session's; this node ends if that record changes: %w",
		m.cfg.Node, m.cfg.Bucket.Name(), err)
}

// look reads all records.
func (m *Member) look(ctx context.Context, acked uint64) (*Look, error) {
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

// soonest is the least time between two writes that do not wait for a heartbeat.
const soonest = 100 * time.Millisecond

// broadcast sends what was written to the other nodes. A node that does not receive it looks again after a heartbeat.
func (m *Member) broadcast() {
	text, err := json.Marshal(Seen{Record: m.machine.announced, Revision: m.revision})
	if err == nil {
		// fails only without a connection
		_ = m.cfg.Namespace.Conn().Send(jetstream.NodesSubject(m.cfg.Namespace.Name()), "", text)
	}
}

func (m *Member) receive(text []byte) {
	var s Seen
	if strictjson.Unmarshal(text, &s) == nil && m.machine.Receive(s) {
		m.show()
	}
}

// show makes a view of what is known now.
func (m *Member) show() *View {
	view := m.machine.View()
	m.views.now.Store(view)
	if m.cfg.Viewed != nil {
		m.cfg.Viewed(view)
	}
	return view
}

// Announce has Run write what the keeper serves now, without waiting for the next heartbeat. It returns when that is
// done, or ctx has ended. Any goroutine may call it.
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

// Run keeps the node a member until ctx ends, and then until other nodes have acquired what it has, for Drain, or until
// the connection is closed. The error wraps [ErrNameInUse] if another process took its name.
func (m *Member) Run(ctx context.Context) error {
	working := context.WithoutCancel(ctx)
	begun, acked := time.Now(), uint64(0)
	tick := time.NewTicker(m.cfg.Heartbeat)
	defer tick.Stop()
	heard, over := make(chan []byte), make(chan struct{})
	deaf, err := m.cfg.Namespace.Conn().Subscribe(jetstream.NodesSubject(m.cfg.Namespace.Name()),
		func(r jetstream.Request) {
			select {
			case heard <- r.Body:
			case <-over:
			}
		})
	if err == nil { // else the connection is closed
		defer deaf() // the server has the subscription before it answers the first look: nothing between is missed
	}
	defer close(over)
	var drained <-chan time.Time
	troubled := false
	var asked chan struct{} // the caller of Announce waits for it
	for {
		leave := ctx.Err() != nil
		if leave && m.cfg.Host { // no node hears anything without this process
			if !troubled {
				_ = m.remove(working) // else the process that comes next knows that this one has ended
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
			return nil // the record stays; the other nodes find that this one is silent
		}
		var look *Look
		if err == nil {
			if acked = m.machine.heartbeat; news {
				m.broadcast()
			}
		}
		if err == nil || m.cfg.Host {
			var unread error
			look, unread = m.look(working, acked)
			err = errors.Join(err, unread)
		}
		if m.cfg.Trouble != nil && (err != nil || troubled) {
			m.cfg.Trouble(err)
		}
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
			return m.remove(working)
		}
		ended := ctx.Done()
		if leave {
			ended = nil
		}
		var early <-chan time.Time
		for waiting := true; waiting; {
			select {
			case <-m.cfg.Keeper.ModelsChanged():
				if early == nil && m.machine.MustAnnounce(m.cfg.Keeper.Advertisement()) {
					early = time.After(soonest - time.Since(wrote))
				}
			case text := <-heard:
				m.receive(text)
			case asked = <-m.asked:
				waiting = false
			case <-tick.C:
				waiting = false
			case <-early:
				waiting = false
			case <-ended:
				waiting = false
			case <-drained:
				return m.remove(working)
			}
		}
	}
}

// recreate creates the bucket again if it was deleted. All nodes that are alive write their records again.
func (m *Member) recreate(ctx context.Context) {
	if m.cfg.Recreate == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	if !m.cfg.Bucket.Gone(ctx) {
		return
	}
	if err := m.cfg.Recreate(ctx); m.cfg.Recreated != nil {
		m.cfg.Recreated(err)
	}
}

// remove deletes the record, so that no node waits until this one is found dead.
func (m *Member) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.DeadAfter)
	defer cancel()
	_, err := m.cfg.Bucket.Sweep(ctx, "", func(key string) bool { return key != m.key }, m.revision+1)
	return err
}
