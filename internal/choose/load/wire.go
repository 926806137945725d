package load

import (
	"math"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// A request on the wire is a sequence of MessagePack values within the messages of [shared.Machine]: the remaining
// milliseconds and the state. A whole request also has the model, group, id, rank, private blocks, tokens, expected
// output and hashes.

const maxName = 255 // bytes of a model, group or worker

// event is a state of a request, sent by another node.
type event struct {
	model Model
	record
	left time.Duration // the remaining time when the event was sent
}

// appendState appends the canonical form of a state.
func appendState(b []byte, s *state) []byte {
	b = msgp.AppendArrayHead(b, 6)
	b = msgp.AppendUint(msgp.AppendBool(msgp.AppendBool(b, s.done), s.gone), uint64(s.extended))
	b = msgp.AppendArrayHead(b, 2*len(s.outs))
	for _, o := range s.outs {
		b = msgp.AppendUint(msgp.AppendUint(b, o.origin), uint64(o.n))
	}
	if s.mark.after == 0 {
		b = msgp.AppendNil(b)
	} else {
		b = msgp.AppendUint(msgp.AppendArrayHead(b, 3), uint64(s.mark.after))
		b = msgp.AppendUint(msgp.AppendUint(b, s.mark.origin), s.mark.weight)
	}
	b = msgp.AppendArrayHead(b, 2*len(s.runs))
	for _, r := range s.runs {
		b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.from)), r.weight)
	}
	return b
}

// appendRecord appends a whole request, or only the state.
func appendRecord(b []byte, model Model, r *record, left time.Duration, whole bool) []byte {
	b = appendState(msgp.AppendUint(b, uint64(max(left, 0).Milliseconds())), &r.state)
	if !whole {
		return b
	}
	b = msgp.AppendStr(msgp.AppendStr(appendModel(b, model), r.id), string(r.rank.Instance))
	b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.rank.Rank)), uint64(r.private))
	b = msgp.AppendUint(msgp.AppendUint(b, uint64(r.tokens)), uint64(r.expected))
	return appendHashes(b, r.hashes)
}

func appendModel(b []byte, m Model) []byte { return msgp.AppendStr(msgp.AppendStr(b, m.Name), m.Group) }

func appendHashes(b []byte, list []events.SeqHash) []byte {
	return littleendian.Append(msgp.AppendBinHead(b, 8*len(list)), list)
}

// appendPast appends an ended request.
func appendPast(b []byte, model Model, q *Request) []byte {
	b = msgp.AppendUint(msgp.AppendUint(appendModel(b, model), q.Key.Owner), q.Key.Seq)
	b = msgp.AppendUint(b, uint64(min(max(q.Age.Milliseconds(), 0), math.MaxUint32)))
	b = msgp.AppendStr(msgp.AppendBool(b, q.PrefillDone), string(q.Rank.Instance))
	b = msgp.AppendUint(msgp.AppendUint(b, uint64(q.Rank.Rank)), uint64(q.Private))
	return appendHashes(b, q.Hashes)
}

// readEvent reads a request, and hashes the key and the state.
func readEvent(r *shared.Reader, k Key, whole bool) (e event, hash uint64) {
	e.key, e.left, e.state = k, readMilliseconds(r), readState(r)
	var room [256]byte
	hash = hashState(appendState(room[:0], &e.state), k)
	if !whole {
		return e, hash
	}
	e.model, e.id = readModel(r), r.Text(maxID)
	e.rank = readRank(r)
	e.private = uint32(r.Number(maxPrompt))
	e.tokens = int64(r.Number(maxTokens))
	e.expected = uint32(r.Number(math.MaxUint32))
	r.OK(e.id != "")
	e.hashes = readHashes(r)
	return e, hash
}

func readModel(r *shared.Reader) Model { return Model{r.Text(maxName), r.Text(maxName)} }

func readRank(r *shared.Reader) events.RankKey {
	k := events.RankKey{Instance: events.WorkerID(r.Text(maxName)), Rank: events.Rank(r.Number(math.MaxUint32))}
	r.OK(k.Instance != "")
	return k
}

func readMilliseconds(r *shared.Reader) time.Duration {
	return time.Duration(r.Number(math.MaxUint32)) * time.Millisecond
}

func readHashes(r *shared.Reader) (list []events.SeqHash) {
	if r.Bad {
		return nil
	}
	bin, ok := r.Bin()
	if r.OK(ok && len(bin)%8 == 0 && len(bin)/8 <= maxPrompt) && len(bin) > 0 {
		list = make([]events.SeqHash, len(bin)/8)
		littleendian.Read(list, bin)
	}
	return list
}

func readPast(r *shared.Reader) (model Model, q Request) {
	model = readModel(r)
	q.Key = Key{Owner: r.Number(math.MaxUint64), Seq: r.Number(math.MaxUint64)}
	q.Age, q.PrefillDone, q.Rank = readMilliseconds(r), r.Flag(), readRank(r)
	q.Private, q.Hashes = int(r.Number(math.MaxUint32)), readHashes(r)
	return model, q
}

func readState(r *shared.Reader) (s state) {
	r.List(6)
	s.done, s.gone, s.extended = r.Flag(), r.Flag(), uint32(r.Number(math.MaxUint32))
	total := uint64(0)
	for i := range r.Pairs() {
		o := outCount{r.Number(math.MaxUint64), uint32(r.Number(maxOutputs))}
		if !r.OK(o.n > 0 && (i == 0 || s.outs[i-1].origin < o.origin)) {
			return s
		}
		s.outs = append(s.outs, o)
		total += uint64(o.n)
	}
	if r.Bad || !r.Null() {
		r.List(3)
		s.mark = mark{uint32(r.Number(min(total, math.MaxUint32))), r.Number(math.MaxUint64), r.Number(one)}
		r.OK(s.mark.after > 0)
	}
	for i := range r.Pairs() {
		v := run{uint32(r.Number(maxPrompt)), r.Number(one)}
		if !r.OK(i == 0 || s.runs[i-1].from < v.from) {
			return s
		}
		s.runs = append(s.runs, v)
	}
	return s
}
