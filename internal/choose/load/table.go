package load

import (
	"container/heap"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/prompts"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Errors of a [Table]'s operations. The callers' reactions differ: choose another id, do nothing, retry later, correct
// the request.
var (
	ErrConflict = errors.New("a request with this id is under way")
	ErrUnknown  = errors.New("no request with this id is under way")
	ErrFull     = errors.New("too many requests or blocks are under way")
	ErrInvalid  = errors.New("bad booking")
)

// Limits limit a [Table]. The table checks a booking and an output block against all requests under way on all nodes.
// The table accepts all bookings of remote nodes. So if nodes have different limits, a node with lower limits refuses
// earlier, and all nodes keep as much as the greatest limit allows.
type Limits struct {
	Requests int           // under way at once, at most [MaxRequests]; 0: [DefaultRequests]
	Blocks   int           // of all prompts and outputs, shared blocks counted for each request; 0: 256 times Requests
	Prompt   int           // blocks of a prompt; 0: 65,536, half a MiB on the wire
	Expiry   time.Duration // the longest time of a request without progress; 0: [DefaultExpiry]
}

func (l *Limits) setDefaults() {
	set := func(v *int, usual, most int) {
		if *v <= 0 {
			*v = usual
		}
		*v = min(*v, most)
	}
	set(&l.Requests, DefaultRequests, MaxRequests)
	set(&l.Blocks, blocksEach*l.Requests, blocksEach*MaxRequests)
	set(&l.Prompt, maxPrompt, maxPrompt)
	if l.Expiry <= 0 {
		l.Expiry = DefaultExpiry
	}
	l.Expiry = min(l.Expiry, MaxExpiry)
}

// DefaultExpiry is the default of Limits.Expiry, as in Dynamo.
const DefaultExpiry = 300 * time.Second

// MaxExpiry is the greatest age in an event, 49 days.
const MaxExpiry = math.MaxUint32 * time.Millisecond

// Limits of requests under way.
const (
	DefaultRequests = 1 << 16
	MaxRequests     = 1 << 20
)

const (
	blocksEach = 256     // for each of Limits.Requests
	maxPrompt  = 1 << 16 // blocks
	maxID      = 1 << 10 // bytes of a request id
	maxTokens  = 1 << 40
	maxOutputs = 1 << 20 // blocks of a request
)

// Booking is a request sent to a worker's rank.
type Booking struct {
	ID             string // 1 to 1,024 bytes; unique in the table while the request is under way
	Rank           events.RankKey
	Hashes         []events.SeqHash // of the prompt's whole blocks; at most Limits.Prompt. The table keeps a copy
	NoReuse        bool             // the blocks are private: requests do not share the blocks
	PrefillTokens  int64            // uncached tokens of the prompt; 0 if untracked
	ExpectedOutput uint32           // tokens; 0: unknown. The table only stores the number
}

func (b *Booking) check(l *Limits) error {
	switch {
	case b.ID == "" || len(b.ID) > maxID:
		return fmt.Errorf("%w: the id has %d bytes; the range is 1 to %d", ErrInvalid, len(b.ID), maxID)
	case b.Rank.Instance == "" || len(b.Rank.Instance) > maxName:
		return fmt.Errorf("%w: the worker's name has %d bytes; the range is 1 to %d", ErrInvalid,
			len(b.Rank.Instance), maxName)
	case len(b.Hashes) > l.Prompt:
		return fmt.Errorf("%w: the prompt has %d blocks; the limit is %d", ErrInvalid, len(b.Hashes), l.Prompt)
	case b.PrefillTokens < 0 || b.PrefillTokens > maxTokens:
		return fmt.Errorf("%w: the request has %d prefill tokens; the range is 0 to %d", ErrInvalid, b.PrefillTokens,
			int64(maxTokens))
	}
	return nil
}

// Load is the pending work of a rank.
type Load struct {
	Rank          events.RankKey
	PrefillTokens int64 // of requests without complete prefill
	Prefilling    int32 // requests with pending prefill tokens
	Blocks        int64 // of all requests, shared blocks counted once, by weight, rounded
	Requests      int32
	Depth         int32 // the greatest number of leading hashes of the query in a request of the rank
}

// Counts counts the events of a table since its creation.
type Counts struct {
	Booked, PrefillDone, OutputBlocks, Freed uint64 // operations on this node
	Conflicts, Unknown, Full, Invalid        uint64 // refused operations
	Expired                                  uint64 // requests dropped because of age
	Gone                                     uint64 // requests of removed ranks

	Rivals     uint64 // requests that lost the id to a booking of another node
	Superseded uint64 // requests ended by a later request of the same node with the same id
}

// Key identifies a booking: the node's session and the number of the booking in the session, from 1. A router may use
// the id of a freed request again. A key is never used again.
type Key = shared.Key

// record is a request under way.
type record struct {
	key      Key
	id       string
	rank     events.RankKey
	hashes   []events.SeqHash // shared with Table.prompts: never changed
	private  uint32           // blocks of the prompt without hashes
	tokens   int64
	expected uint32
	state
	deadline time.Duration
	first    time.Duration // of the first token; 0: unknown
	end      time.Duration // of the call that frees the request; 0: none
	digest   uint64

	row   *row    // nil: gone
	pos   int     // in row.records
	tail  *node   // the end of hashes in Table.prompts
	due   int     // in Table.queue
	rival *record // the next record with the same id and a greater key
}

func (r *record) blocks() int { return len(r.hashes) + int(r.private) + int(r.outputs()) }

// Table holds the requests under way of a model, and the resulting load of each rank. Concurrent reads ([Table.Loads],
// [Table.Digest]) are safe. All other methods need exclusive access. All times are of the same monotonic clock.
//
// Invariants, verified by Check:
//  1. A row's load, and the whole trie of prompts, are a function of the set of records.
//  2. A block of a rank has the greatest weight among the copies of the rank's requests. All copies are equal unless
//     nodes have changed copies at the same time.
//  3. ids has the record with the least key of each id.
type Table struct {
	Counts Counts

	limits  Limits
	origin  uint64
	next    uint64 // the last key, unless key is set
	key     func() Key
	records map[Key]*record
	ids     map[string]*record
	rivals  map[string]time.Duration // ids of several records, with the time of the second record
	queue   queue
	rows    []*row
	loads   []Load // by row; Depth is 0
	byRank  map[events.RankKey]*row
	prompts prompts.Trie[share]
	places  []int32  // by row.id: row.index, for prompts.Depths
	free    []uint32 // ids without a row
	changes uint64   // of rows
	blocks  int
	sum     Digest
	reuse   routing.Reuse
	scratch []byte

	changed func(change, *record) // called after a local change of a request
	watch   func(*Request)        // receives the changes of requests of all nodes; may be nil
}

// Request reports a change of a request: New, changed, or Ended. Without New and Ended the fields are the present
// state, changed or not.
type Request struct {
	Key         Key
	ID          string
	Rank        events.RankKey
	Hashes      []events.SeqHash // of the prompt's sharable blocks; never changed
	Private     int              // private blocks of the prompt
	Outputs     int              // blocks
	PrefillDone bool             // the request has its first output token
	New, Ended  bool
	Age         time.Duration // of a new request: since its booking, on any node

	Own        bool          // booked on this node
	Freed      bool          // ended by a call, not by age, a removed rank or another request
	Life       time.Duration // of a freed request: from booking to end
	FirstToken time.Duration // from booking to first output token; 0: unknown
}

// notify passes a request to the watcher.
func (t *Table) notify(r *record, age time.Duration, isNew, ended bool) {
	if t.watch == nil {
		return
	}
	q := &Request{Key: r.key, ID: r.id, Rank: r.rank, Hashes: r.hashes, Private: int(r.private),
		Outputs:     int(r.outputs()),
		PrefillDone: r.done, Age: age, New: isNew, Ended: ended || r.gone, Own: r.key.Owner == t.origin, Freed: r.end > 0}
	if r.end > 0 {
		q.Life = r.end - t.sent(r)
	}
	if r.first > 0 {
		q.FirstToken = r.first - t.sent(r)
	}
	t.watch(q)
}

// change is a local change of a record.
type change uint8

const (
	booked change = iota + 1
	updated
	freed
	gone    // the rank was removed; all nodes detect the removal
	outlive // ended because of age or of another record; all nodes detect the end
)

// NewTable returns an empty table. The random origin identifies the node's session among all nodes with bookings of the
// model.
func NewTable(origin uint64, limits Limits) *Table {
	limits.setDefaults()
	t := &Table{
		limits: limits, origin: origin, records: map[Key]*record{}, ids: map[string]*record{},
		rivals: map[string]time.Duration{}, byRank: map[events.RankKey]*row{}, changed: func(change, *record) {},
	}
	t.key = func() Key { t.next++; return Key{Owner: origin, Seq: t.next} }
	return t
}

// Book adds a request. Errors: [ErrInvalid], [ErrConflict], [ErrFull].
func (t *Table) Book(now time.Duration, b Booking) error {
	t.expire(now)
	if err := b.check(&t.limits); err != nil {
		t.Counts.Invalid++
		return err
	}
	if t.ids[b.ID] != nil {
		t.Counts.Conflicts++
		return fmt.Errorf("book %.64q: %w", b.ID, ErrConflict)
	}
	if len(t.records) >= t.limits.Requests || t.blocks+len(b.Hashes) > t.limits.Blocks {
		t.Counts.Full++
		return fmt.Errorf("book %.64q: %w: %d requests with %d blocks", b.ID, ErrFull, len(t.records), t.blocks)
	}
	r := &record{key: t.key(), id: b.ID, rank: b.Rank, tokens: b.PrefillTokens, expected: b.ExpectedOutput,
		deadline: now + t.limits.Expiry}
	if b.NoReuse {
		r.private = uint32(len(b.Hashes))
	} else {
		r.hashes = slices.Clone(b.Hashes)
		if row := t.byRank[b.Rank]; row != nil {
			r.runs = t.inherited(row, r.hashes)
		}
	}
	t.Counts.Booked++
	t.insert(now, r)
	t.changed(booked, r)
	return nil
}

// find returns the record of an id under way. A request of a removed rank is no longer under way: find frees the id.
func (t *Table) find(now time.Duration, id string) (*record, error) {
	t.expire(now)
	r := t.ids[id]
	if r != nil && r.gone {
		t.remove(now, r)
		t.changed(freed, r)
		r = nil
	}
	if r == nil {
		t.Counts.Unknown++
		return nil, fmt.Errorf("%w: %.64q", ErrUnknown, id)
	}
	return r, nil
}

// extensionParts bounds the extensions of a request within Limits.Expiry. Progress soon after an extension changes
// nothing, so a fast stream does not flood the fleet.
const extensionParts = 8

// extend restarts the expiry of a request in its next state. It returns false soon after the last restart.
func (t *Table) extend(now time.Duration, r *record, next *state) bool {
	age := min(now-t.sent(r), MaxExpiry)
	if age-r.progress() < t.limits.Expiry/extensionParts {
		return false
	}
	next.extended = uint32(age.Milliseconds())
	return true
}

// Progress marks a request as running and restarts the expiry. Error: [ErrUnknown].
func (t *Table) Progress(now time.Duration, id string) error {
	r, err := t.find(now, id)
	if err != nil {
		return err
	}
	if next := r.state; t.extend(now, r, &next) {
		t.replace(now, r, next)
		t.changed(updated, r)
	}
	return nil
}

// PrefillComplete records a request's first output token and removes the prefill tokens. Each call, even a repeated
// call, is also a [Table.Progress]. Error: [ErrUnknown].
func (t *Table) PrefillComplete(now time.Duration, id string) error {
	r, err := t.find(now, id)
	if err != nil {
		return err
	}
	next := r.state
	next.done = true
	if t.extend(now, r, &next) || !r.done {
		if !r.done {
			t.Counts.PrefillDone++
		}
		t.replace(now, r, next)
		t.changed(updated, r)
	}
	return nil
}

// OutputBlock adds an output block to a request. A fraction of 0 to 1 becomes the weight of all output blocks of the
// request, and of the prompt's blocks that no other request of the rank shares. A negative fraction changes no weight.
// The call is also a [Table.Progress]. Errors: [ErrInvalid], [ErrUnknown], [ErrFull].
func (t *Table) OutputBlock(now time.Duration, id string, fraction float64) error {
	if !(fraction <= 1) {
		t.Counts.Invalid++
		return fmt.Errorf("%w: the decay fraction is %v; the range is 0 to 1", ErrInvalid, fraction)
	}
	r, err := t.find(now, id)
	if err != nil {
		return err
	}
	n := r.outputs() + 1
	if n > maxOutputs || t.blocks >= t.limits.Blocks {
		t.Counts.Full++
		return fmt.Errorf("output block of %.64q: %w", id, ErrFull)
	}
	next := r.state
	t.extend(now, r, &next)
	next.outs = slices.Clone(r.outs)
	at, ok := slices.BinarySearchFunc(next.outs, t.origin, compareOrigins)
	if !ok {
		next.outs = slices.Insert(next.outs, at, outCount{origin: t.origin})
	}
	next.outs[at].n++
	if fraction >= 0 {
		next.mark = mark{after: uint32(n), origin: t.origin, weight: weightOf(fraction)}
		if from := r.row.exclusive(r.tail, len(r.hashes)); from < len(r.hashes) {
			next.runs = addRun(r.runs, from, next.mark.weight)
		}
	}
	t.replace(now, r, next)
	t.Counts.OutputBlocks++
	t.changed(updated, r)
	return nil
}

// Free ends a request. Error: [ErrUnknown].
func (t *Table) Free(now time.Duration, id string) error {
	r, err := t.find(now, id)
	if err != nil {
		return err
	}
	t.freed(now, r)
	t.remove(now, r)
	t.Counts.Freed++
	t.changed(freed, r)
	return nil
}

// RemoveRank removes a rank. The requests of the rank lose all weight, and calls return [ErrUnknown]. The id of a
// request stays in use until the first such call, or until the request expires.
func (t *Table) RemoveRank(key events.RankKey) {
	row := t.byRank[key]
	if row == nil {
		return
	}
	for len(row.records) > 0 {
		r := row.records[len(row.records)-1]
		next := r.state
		next.gone = true
		t.replace(0, r, next)
		t.Counts.Gone++
		t.changed(gone, r)
	}
	t.removeRow(row)
}

// Loads appends the load of every rank to dst[:0], by row, with the depth of seq in its requests.
func (t *Table) Loads(dst []Load, seq []events.SeqHash) []Load {
	dst = append(dst[:0], t.loads...)
	for i, depth := range t.Depths(nil, seq) {
		dst[i].Depth = depth
	}
	return dst
}

// Rows returns the load of every rank, by row, without depths. The slice belongs to the table and changes with the
// table.
func (t *Table) Rows() []Load { return t.loads }

// Pace returns the locally measured prefill rate of a row's rank, and the milliseconds of work on the rank's pending
// prefills since the last first token. working is 0 without pending prefills. p belongs to the table.
func (t *Table) Pace(i int, now time.Duration) (p *routing.Pace, working float64) {
	row := t.rows[i]
	if t.loads[i].Prefilling > 0 {
		working = row.pace.Working(now, row.since)
	}
	return &row.pace, working
}

// Reuse returns the ages at which blocks of booked prompts were requested again. The result belongs to the table.
func (t *Table) Reuse() *routing.Reuse { return &t.reuse }

// Depths returns, by row, the number of leading hashes of seq in the requests of each rank. It allocates only if dst is
// too short.
func (t *Table) Depths(dst []int32, seq []events.SeqHash) []int32 {
	dst = slices.Grow(dst[:0], len(t.loads))[:len(t.loads)]
	clear(dst)
	prompts.Depths(&t.prompts, seq, t.places, dst)
	return dst
}

// Generation changes with the row of any rank.
func (t *Table) Generation() uint64 { return t.changes }

// Len returns the number of requests under way or with an id in use.
func (t *Table) Len() int { return len(t.records) }

// Blocks returns the number of blocks of all requests. A shared block counts once per request.
func (t *Table) Blocks() int { return t.blocks }

// Has reports whether an id is in use.
func (t *Table) Has(id string) bool { return t.ids[id] != nil }

// Where returns the rank of a request under way.
func (t *Table) Where(id string) (events.RankKey, bool) {
	r := t.ids[id]
	if r == nil || r.gone {
		return events.RankKey{}, false
	}
	return r.rank, true
}

// Tick drops expired requests, and ranks without requests for Limits.Expiry.
func (t *Table) Tick(now time.Duration) {
	t.expire(now)
	for i := len(t.rows) - 1; i >= 0; i-- {
		t.rows[i].pace.Tick(now)
		if row := t.rows[i]; len(row.records) == 0 && now-row.idle >= t.limits.Expiry {
			t.removeRow(row)
		}
	}
}

func (t *Table) expire(now time.Duration) {
	for len(t.queue) > 0 && t.queue[0].deadline <= now {
		r := t.queue[0]
		t.remove(now, r)
		t.Counts.Expired++
		t.changed(outlive, r)
	}
}

// insert adds a new record.
func (t *Table) insert(now time.Duration, r *record) {
	t.records[r.key] = r
	t.blocks += r.blocks()
	heap.Push(&t.queue, r)
	head := &record{rival: t.ids[r.id]}
	at := head
	for at.rival != nil && at.rival.key.Compare(r.key) < 0 {
		at = at.rival
	}
	r.rival, at.rival = at.rival, r
	t.ids[r.id] = head.rival
	if head.rival.rival != nil {
		if _, known := t.rivals[r.id]; !known {
			t.rivals[r.id] = now
		}
	}
	if !r.gone {
		t.attach(r)
	}
	t.reuse.Requested(t.sent(r), r.hashes)
	t.sum.add(r, t.digestOf(r))
	t.notify(r, max(0, now-t.sent(r)), true, false)
}

// remove removes a record.
func (t *Table) remove(now time.Duration, r *record) {
	t.sum.sub(r)
	if r.row != nil {
		row := r.row
		t.detach(r)
		row.idle = now
	}
	delete(t.records, r.key)
	t.blocks -= r.blocks()
	heap.Remove(&t.queue, r.due)
	head := &record{rival: t.ids[r.id]}
	at := head
	for at.rival != r {
		at = at.rival
	}
	at.rival, r.rival = r.rival, nil
	if head.rival == nil {
		delete(t.ids, r.id)
	} else {
		t.ids[r.id] = head.rival
	}
	if head.rival == nil || head.rival.rival == nil {
		delete(t.rivals, r.id)
	}
	t.notify(r, 0, false, true)
}

// prefilled measures a request at its first token.
func (t *Table) prefilled(now time.Duration, r *record) {
	if r.row != nil && !r.done {
		r.row.pace.Prefilled(now, t.sent(r), r.tokens)
	}
}

// freed measures a request at its end.
func (t *Table) freed(now time.Duration, r *record) {
	r.end = now
	if t.prefilled(now, r); r.row != nil {
		r.row.pace.Ended(now, t.sent(r))
	}
}

// sent returns the time of a request's booking.
func (t *Table) sent(r *record) time.Duration { return r.deadline - t.limits.Expiry - r.progress() }

// replace sets a record's state.
func (t *Table) replace(now time.Duration, r *record, next state) {
	if next.done && !next.gone {
		if t.prefilled(now, r); !r.done {
			r.first = now
		}
	}
	if later := next.progress() - r.progress(); later > 0 {
		r.deadline += later
		heap.Fix(&t.queue, r.due)
	}
	t.sum.sub(r)
	t.blocks -= r.blocks()
	switch {
	case r.row == nil:
		r.state = next
	case next.gone:
		t.detach(r)
		r.state = next
	default:
		row := r.row
		t.pend(r, -1)
		row.weight -= r.unsharedWeight(r.private)
		before := r.runs
		r.state = next
		row.weight += r.unsharedWeight(r.private)
		t.pend(r, 1)
		if !slices.Equal(before, r.runs) {
			t.rerun(r, before)
		}
		t.round(row)
	}
	t.blocks += r.blocks()
	t.sum.add(r, t.digestOf(r))
	t.notify(r, 0, false, false)
}
