package api

import (
	"bytes"
	"encoding/binary"
	"reflect"
	"slices"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Queries and answers are encoded and decoded by hand, because reflection would be the largest cost of a query. The
// bytes follow the tags of the fields, in order, with each number in its shortest form. A test compares them with
// marshalReflect. Rare fields, and all other messages, use reflection.

// marshalReflect encodes v by reflection.
func marshalReflect(v any) ([]byte, error) {
	var b bytes.Buffer
	e := msgpack.GetEncoder()
	defer msgpack.PutEncoder(e)
	e.Reset(&b)
	e.UseCompactInts(true)
	err := e.Encode(v)
	return b.Bytes(), err
}

// packer appends values to itself.
type packer []byte

// emptyMap is the first byte of a map without fields. longMap is the first byte of a map with more than 15 fields,
// whose number of fields follows in two bytes.
const (
	emptyMap = 0x80
	longMap  = 0xde
)

// object begins a map of at most 15 fields and returns its position, for field.
func (p *packer) object() int {
	*p = msgp.AppendMapHead(*p, 0)
	return len(*p) - 1
}

// field appends the name of a field to the map at a position. Its value must follow.
func (p *packer) field(at int, name string) {
	(*p)[at]++
	*p = msgp.AppendStr(*p, name)
}

func (p *packer) array(n int)     { *p = msgp.AppendArrayHead(*p, n) }
func (p *packer) number(v uint64) { *p = msgp.AppendUint(*p, v) }

// listHead appends the name of a list and its length, or nil. The elements must follow.
func (p *packer) listHead(at int, name string, n int, null bool) {
	p.field(at, name)
	if null {
		*p = msgp.AppendNil(*p)
	} else {
		p.array(n)
	}
}

func (p *packer) putText(at int, name, s string) {
	p.field(at, name)
	*p = msgp.AppendStr(*p, s)
}

func (p *packer) putNumber(at int, name string, v uint64) {
	p.field(at, name)
	p.number(v)
}

func (p *packer) putTruth(at int, name string, v bool) {
	p.field(at, name)
	*p = msgp.AppendBool(*p, v)
}

func (p *packer) putFloat(at int, name string, v float64) {
	p.field(at, name)
	*p = msgp.AppendFloat(*p, v)
}

// The following functions append a field, unless the value is zero.

func (p *packer) optText(at int, name, s string) {
	if s != "" {
		p.putText(at, name, s)
	}
}

func (p *packer) optNumber(at int, name string, v uint64) {
	if v != 0 {
		p.putNumber(at, name, v)
	}
}

func (p *packer) optTrue(at int, name string, v bool) {
	if v {
		p.field(at, name)
		*p = msgp.AppendBool(*p, v)
	}
}

func (p *packer) optRanges(at int, name string, list [][2]uint32) {
	if len(list) == 0 {
		return
	}
	p.field(at, name)
	p.array(len(list))
	for _, r := range list {
		p.array(2)
		p.number(uint64(r[0]))
		p.number(uint64(r[1]))
	}
}

func (p *packer) optReflect(at int, name string, v any, given bool) error {
	if !given {
		return nil
	}
	p.field(at, name)
	b, err := marshalReflect(v)
	*p = append(*p, b...)
	return err
}

// appendList appends a field with a list, and calls each for every element. The packer is passed by value, since a
// pointer would move it to the heap.
func appendList[T any](p packer, at int, name string, list []T, each func(p packer, v T) packer) packer {
	p.field(at, name)
	p.array(len(list))
	for _, v := range list {
		p = each(p, v)
	}
	return p
}

func appendNumber[T ~uint32](p packer, v T) packer { return msgp.AppendUint(p, uint64(v)) }

// time appends the extension type -1 in the shortest of its three forms.
func (p *packer) time(t time.Time) {
	secs, nanos := uint64(t.Unix()), uint64(t.Nanosecond())
	switch {
	case secs>>32 == 0 && nanos == 0:
		*p = binary.BigEndian.AppendUint32(append(*p, 0xd6, 0xff), uint32(secs))
	case secs>>34 == 0:
		*p = binary.BigEndian.AppendUint64(append(*p, 0xd7, 0xff), nanos<<34|secs)
	default:
		*p = binary.BigEndian.AppendUint32(append(*p, 0xc7, 12, 0xff), uint32(nanos))
		*p = binary.BigEndian.AppendUint64(*p, secs)
	}
}

func (p *packer) hashes(h Hashes) {
	if h == nil {
		*p = msgp.AppendNil(*p)
		return
	}
	*p = littleendian.Append(msgp.AppendBinHead(*p, 8*len(h)), h)
}

// usual reports whether the request has only the fields of nearly all requests.
func (s *SelectRequest) usual() bool {
	rest := *s
	q := &rest.Query
	q.Model, q.BlockSize, q.Tokens, q.Hashes, q.LoRA, q.CacheSalt, q.L3 = "", 0, nil, nil, "", "", ""
	rest.SequenceHashes, rest.ISLTokens, rest.RequestID, rest.Book = nil, 0, "", false
	return reflect.ValueOf(&rest).Elem().IsZero()
}

// packSelect packs a usual request.
func packSelect(s *SelectRequest) []byte {
	p := packer(packQuery(&s.Query, 64+8*len(s.SequenceHashes)+len(s.RequestID)))
	m := 0 // the query's object
	if s.SequenceHashes != nil {
		p.field(m, "sequence_hashes")
		p.hashes(s.SequenceHashes)
	}
	p.optNumber(m, "isl_tokens", s.ISLTokens)
	p.optText(m, "request_id", s.RequestID)
	p.optTrue(m, "book", s.Book)
	return p
}

// usual reports whether a choice has only the fields of most choices.
func (s *Selection) usual() bool {
	return s.Missing == nil && s.UnknownEndpoints == nil && s.Explanation == nil && s.DecodeBusy == nil &&
		s.WorkerLoad == nil && s.Prefill == nil && s.Disaggregation == nil && s.Session == nil && s.KVSource == nil &&
		s.Quota == nil && s.Regions == nil && s.Tokenization == nil
}

// packSelection packs a usual choice.
func packSelection(s *Selection) []byte {
	p := make(packer, 0, 416+len(s.Model)+len(s.RequestID)+len(s.Worker)+len(s.Endpoint)+len(s.Policy))
	p = msgp.AppendMapHead(p, 256) // in the form for 16 to 255 fields
	m := len(p) - 1
	p[m-1] = 0
	p.putText(m, "model", s.Model)
	p.putNumber(m, "block_size", uint64(s.BlockSize))
	p.putNumber(m, "blocks", uint64(s.Blocks))
	p.putNumber(m, "isl_tokens", s.ISLTokens)
	p.optText(m, "request_id", s.RequestID)
	p.putTruth(m, "booked", s.Booked)
	p.putText(m, "worker", string(s.Worker))
	p.putNumber(m, "rank", uint64(s.Rank))
	p.optText(m, "endpoint", s.Endpoint)
	p.putNumber(m, "device", uint64(s.Device))
	p.putNumber(m, "host", uint64(s.Host))
	p.putNumber(m, "disk", uint64(s.Disk))
	p.putNumber(m, "external", uint64(s.External))
	p.putNumber(m, "l3", uint64(s.L3))
	p.optNumber(m, "guessed", uint64(s.Guessed))
	p.putText(m, "policy", s.Policy)
	p.putNumber(m, "candidates", uint64(s.Candidates))
	p.putFloat(m, "cost", s.Cost)
	p.putFloat(m, "probability", s.Probability)
	p.putNumber(m, "required_blocks", s.RequiredBlocks)
	p.putFloat(m, "effective_overlap", s.EffectiveOverlap)
	p.putNumber(m, "cached_tokens", s.CachedTokens)
	p.putNumber(m, "effective_prefill_tokens", s.EffectivePrefillTokens)
	p.putTruth(m, "track_prefill_tokens", s.TrackPrefillTokens)
	p.putNumber(m, "potential_decode_blocks", s.PotentialDecodeBlocks)
	p.putTruth(m, "complete", s.Complete)
	return p
}

// rare reports whether a query has fields that nodes do not send each other, or contradictory fields.
func (q *Query) rare() bool {
	return q.Endpoints != nil || q.WithEndpoint || q.ByEndpoint || q.Text != nil || q.DeadlineMS > 0 || q.Media != nil ||
		q.Diagnostic || q.Regions ||
		q.EngineHashes != nil && (q.Tokens != nil || q.Hashes != nil || q.Hashed != nil)
}

// packQuery packs a query that is not rare, with capacity for more bytes.
func packQuery(q *Query, more int) []byte {
	p := make(packer, 0, 256+8*len(q.Hashes)+4*len(q.Tokens)+4*len(q.Partitions)+more)
	m := p.object()
	p.putText(m, "model", q.Model)
	p.optNumber(m, "block_size", uint64(q.BlockSize))
	if q.Tokens != nil {
		p.field(m, "tokens")
		p = littleendian.Append(msgp.AppendBinHead(p, 4*len(q.Tokens)), q.Tokens)
	}
	if q.Hashes != nil {
		p.field(m, "hashes")
		p.hashes(q.Hashes)
	}
	if q.Hashed != nil {
		p = appendList(p, m, "hashed", q.Hashed, func(p packer, h Hashed) packer {
			m := p.object()
			p.putNumber(m, "lookahead", uint64(h.Lookahead))
			p.field(m, "hashes")
			p.hashes(h.Hashes)
			return p
		})
	}
	if q.EngineHashes != nil {
		p.field(m, "engine_hashes")
		p.hashes(q.EngineHashes)
	}
	p.optText(m, "lora_name", q.LoRA)
	p.optText(m, "cache_salt", q.CacheSalt)
	if q.Workers != nil {
		p = appendList(p, m, "workers", q.Workers, func(p packer, w events.WorkerID) packer {
			return msgp.AppendStr(p, string(w))
		})
	}
	if q.Ranks != nil {
		p = appendList(p, m, "ranks", q.Ranks, func(p packer, r RankPlace) packer {
			m := p.object()
			p.putText(m, "instance", string(r.Instance))
			p.putNumber(m, "rank", uint64(r.Rank))
			return p
		})
	}
	if len(q.Within) > 0 {
		p = appendList(p, m, "within", q.Within, func(p packer, t Tiers) packer { return msgp.AppendStr(p, string(t)) })
	}
	p.optTrue(m, "with_engine_hashes", q.WithEngineHashes)
	if q.Partitions != nil {
		p = appendList(p, m, "partitions", q.Partitions, appendNumber)
	}
	if len(q.MinSeq) > 0 {
		p = appendList(p, m, "min_seq", q.MinSeq, func(p packer, s PartitionSeq) packer {
			m := p.object()
			p.putNumber(m, "partition", uint64(s.Partition))
			p.putNumber(m, "seq", uint64(s.Seq))
			return p
		})
	}
	p.optTrue(m, "explain", q.Explain)
	p.optTrue(m, "idle", q.Idle)
	p.optText(m, "l3", string(q.L3))
	p.optNumber(m, "l3_timeout_ms", uint64(q.L3TimeoutMS))
	return p
}

func packAnswer(a *Answer) ([]byte, error) {
	if a.Blocks < 0 {
		return marshalReflect(a)
	}
	p := make(packer, 0, 512+96*len(a.Workers)+48*len(a.Partitions)+12*(len(a.L3.Ranges)+len(a.L3.Unknown)))
	m := p.object()
	p.putText(m, "model", a.Model)
	p.putNumber(m, "block_size", uint64(a.BlockSize))
	p.putNumber(m, "blocks", uint64(a.Blocks))
	if len(a.Lookaheads) > 0 {
		p = appendList(p, m, "lookaheads", a.Lookaheads, appendNumber)
	}
	p.field(m, "complete")
	p = msgp.AppendBool(p, a.Complete)
	if len(a.Missing) > 0 {
		p = appendList(p, m, "missing", a.Missing, appendNumber)
	}
	p.listHead(m, "workers", len(a.Workers), a.Workers == nil)
	for i := range a.Workers {
		if err := p.overlap(&a.Workers[i]); err != nil {
			return nil, err
		}
	}
	if err := p.optReflect(m, "by_endpoint", a.ByEndpoint, len(a.ByEndpoint) > 0); err != nil {
		return nil, err
	}
	if err := p.optReflect(m, "unknown_endpoints", a.UnknownEndpoints, len(a.UnknownEndpoints) > 0); err != nil {
		return nil, err
	}
	p.listHead(m, "partitions", len(a.Partitions), a.Partitions == nil)
	for i := range a.Partitions {
		p.status(&a.Partitions[i])
	}
	p.optText(m, "reason", string(a.Reason))
	p.field(m, "l3")
	if err := p.l3(&a.L3); err != nil {
		return nil, err
	}
	err := p.optReflect(m, "regions", a.Regions, len(a.Regions) > 0)
	return p, err
}

func (p *packer) status(s *PartitionStatus) {
	m := p.object()
	p.putNumber(m, "partition", uint64(s.Partition))
	p.field(m, "epoch")
	p.time(s.Epoch)
	p.putNumber(m, "seq", uint64(s.Seq))
	p.optNumber(m, "stale_ms", s.StaleMS)
	p.optTrue(m, "resync_needed", s.ResyncNeeded)
}

func (p *packer) overlap(o *Overlap) error {
	m := p.object()
	p.putText(m, "instance", string(o.Instance))
	// An answer consists mostly of these six fields. Their names are written with their heads.
	b := *p
	b[m] += 6
	b = msgp.AppendUint(append(b, "\xa4rank"...), uint64(o.Rank))
	b = msgp.AppendUint(append(b, "\xa6device"...), uint64(o.Device))
	b = msgp.AppendUint(append(b, "\xa4host"...), uint64(o.Host))
	b = msgp.AppendUint(append(b, "\xa4disk"...), uint64(o.Disk))
	b = msgp.AppendUint(append(b, "\xa8external"...), uint64(o.External))
	*p = msgp.AppendUint(append(b, "\xa2l3"...), uint64(o.L3))
	p.optText(m, "l3_stop", o.L3Stop)
	err := p.optReflect(m, "path", o.Path, o.Path != nil)
	p.optText(m, "bound", string(o.Bound))
	p.optText(m, "engine", string(o.Engine))
	p.optTrue(m, "catching_up", o.CatchingUp)
	p.optNumber(m, "guessed", uint64(o.Guessed))
	p.optText(m, "endpoint", o.Endpoint)
	if len(o.Within) > 0 {
		*p = appendList(*p, m, "within", o.Within, appendNumber)
	}
	if len(o.EngineHashes) > 0 {
		p.field(m, "engine_hashes")
		p.hashes(o.EngineHashes)
	}
	p.optNumber(m, "held", uint64(o.Held))
	p.optNumber(m, "full", uint64(o.Full))
	if n := (*p)[m] - emptyMap; n > 15 { // too many for the short head
		*p = slices.Replace(*p, m, m+1, longMap, 0, n)
	}
	return err
}

func (p *packer) l3(l *L3) error {
	m := p.object()
	p.putText(m, "status", string(l.Status))
	p.optText(m, "reason", l.Reason)
	p.optRanges(m, "ranges", l.Ranges)
	p.putNumber(m, "total", uint64(l.Total))
	p.field(m, "age_ms")
	*p = msgp.AppendFloat(*p, l.AgeMS)
	p.optRanges(m, "unknown", l.Unknown)
	err := p.optReflect(m, "broken", l.Broken, len(l.Broken) > 0)
	p.putNumber(m, "from_start", uint64(l.FromStart))
	return err
}
