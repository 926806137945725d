package affinity

import (
	"bytes"
	"errors"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// wireVersion, kinds and the order of fields are wire constants. A message of another version is malformed.
const wireVersion = 1

const (
	kindBindings = 1 // Sent, Bindings
	kindBeat     = 2 // Ready, Ask, To, Calm, Count, Sum, Sent
	kindQuestion = 3 // To, Question, Sums
	kindAnswer   = 4 // To, Question, Part, Parts, Bindings
)

const (
	maxMessage = 4 << 20 // bytes, of what is read
	maxSeq     = 1 << 62
	maxParts   = 1 << 16
)

// message is an array of its fields.
type message struct {
	Version, Kind uint8
	From, To      uint64
	Ready, Ask    bool
	Calm          bool
	Count         int
	Sum           uint64
	Sent          uint64 // messages of bindings until now, this one among them
	Question      uint64
	Part, Parts   int
	Sums          []uint64
	Bindings      []wireBinding
}

// wireBinding is an array of its fields.
type wireBinding struct {
	Model, Session string
	Worker         string
	Rank           uint32
	Seq, Writer    uint64
	UseSeq         uint64
	UseWriter      uint64
	LeftMS         int64 // of its life, when it was sent
}

func toWire(b *binding, now time.Duration) wireBinding {
	return wireBinding{Model: b.key.Model, Session: b.key.Session, Worker: string(b.rank.Instance),
		Rank: uint32(b.rank.Rank), Seq: b.is.Seq, Writer: b.is.Writer, UseSeq: b.used.Seq, UseWriter: b.used.Writer,
		LeftMS: int64((b.ends - now + time.Millisecond - 1) / time.Millisecond)}
}

func (w *wireBinding) binding() binding {
	return binding{key: Key{w.Model, w.Session}, rank: events.RankKey{Instance: events.WorkerID(w.Worker),
		Rank: events.Rank(w.Rank)}, is: version{w.Seq, w.Writer}, used: version{w.UseSeq, w.UseWriter}}
}

func (w *wireBinding) valid() bool {
	return w.Session != "" && len(w.Session) <= MaxID && len(w.Model) <= maxName && w.Worker != "" &&
		len(w.Worker) <= maxName && w.Seq > 0 && w.Seq <= w.UseSeq && w.UseSeq <= maxSeq && w.LeftMS >= 0 &&
		w.LeftMS <= MaxTTL.Milliseconds()
}

func encode(m *message) []byte {
	m.Version = wireVersion
	var b bytes.Buffer
	e := msgpack.GetEncoder()
	defer msgpack.PutEncoder(e)
	e.Reset(&b)
	e.UseCompactInts(true)
	e.UseArrayEncodedStructs(true)
	if err := e.Encode(m); err != nil {
		panic(err) // a buffer takes all, and there is no type that msgpack does not know
	}
	return b.Bytes()
}

var errMalformed = errors.New("malformed message")

func decode(data []byte) (*message, error) {
	var m message
	r := bytes.NewReader(data)
	if len(data) > maxMessage || msgpack.NewDecoder(r).Decode(&m) != nil || r.Len() > 0 || m.Version != wireVersion {
		return nil, errMalformed
	}
	ok := m.Kind >= kindBindings && m.Kind <= kindAnswer && m.Count >= 0 && m.Sent <= maxSeq &&
		(len(m.Sums) == 0 || len(m.Sums) == parts) && len(m.Bindings) <= maxEntries
	if m.Kind == kindAnswer {
		ok = ok && m.Part >= 0 && m.Part < m.Parts && m.Parts <= maxParts
	}
	for i := range m.Bindings {
		ok = ok && m.Bindings[i].valid()
	}
	if !ok {
		return nil, errMalformed
	}
	return &m, nil
}
