package api

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// Queries and answers are written and read by hand, since their forms in MessagePack are most of what a query costs
// otherwise. The form is that of their fields' tags, in order, with numbers as short as they can be: [reflected], by
// reflection, gives the same bytes, as a test holds. What is read otherwise than so, or comes from somebody who writes
// it otherwise, is left to reflection too (unpack.go).

// reflected encodes v by reflection.
func reflected(v any) ([]byte, error) {
	var b bytes.Buffer
	e := msgpack.GetEncoder()
	defer msgpack.PutEncoder(e)
	e.Reset(&b)
	e.UseCompactInts(true)
	err := e.Encode(v)
	return b.Bytes(), err
}

// packer appends values in MessagePack (https://github.com/msgpack/msgpack/blob/master/spec.md).
type packer []byte

func (p *packer) head(n int, fix byte, fixMax int, wide byte) {
	switch {
	case n <= fixMax:
		*p = append(*p, fix|byte(n))
	case n < 1<<16:
		*p = binary.BigEndian.AppendUint16(append(*p, wide), uint16(n))
	default:
		*p = binary.BigEndian.AppendUint32(append(*p, wide+1), uint32(n))
	}
}

func (p *packer) array(n int)  { p.head(n, 0x90, 15, 0xdc) }
func (p *packer) fields(n int) { p.head(n, 0x80, 15, 0xde) }

func (p *packer) text(s string) {
	if n := len(s); n > 31 && n < 1<<8 {
		*p = append(*p, 0xd9, byte(n))
	} else {
		p.head(n, 0xa0, 31, 0xda)
	}
	*p = append(*p, s...)
}

func (p *packer) number(v uint64) { *p = appendNumber(*p, v) }

func appendNumber(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

func (p *packer) truth(v bool) {
	if v {
		*p = append(*p, 0xc3)
	} else {
		*p = append(*p, 0xc2)
	}
}

func (p *packer) none() { *p = append(*p, 0xc0) }

func (p *packer) float(v float64) {
	*p = binary.BigEndian.AppendUint64(append(*p, 0xcb), math.Float64bits(v))
}

// time writes the extension type -1 in the shortest of its three forms.
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

// bin writes the head of so many bytes.
func (p *packer) bin(n int) {
	if n < 1<<8 {
		*p = append(*p, 0xc4, byte(n))
	} else {
		p.head(n, 0, -1, 0xc5)
	}
}

func (p *packer) hashes(h Hashes) {
	if h == nil {
		p.none()
		return
	}
	p.bin(8 * len(h))
	at := len(*p)
	*p = slices.Grow(*p, 8*len(h))[:at+8*len(h)]
	for to := (*p)[at:]; len(h) > 0 && len(to) >= 8; h, to = h[1:], to[8:] {
		binary.LittleEndian.PutUint64(to, h[0])
	}
}

func (p *packer) ranges(list [][2]uint32) {
	p.array(len(list))
	for _, r := range list {
		p.array(2)
		p.number(uint64(r[0]))
		p.number(uint64(r[1]))
	}
}

func (p *packer) partitions(list []events.Partition) {
	p.array(len(list))
	for _, v := range list {
		p.number(uint64(v))
	}
}

// count returns how many of the things are so.
func count(things ...bool) (n int) {
	for _, t := range things {
		if t {
			n++
		}
	}
	return n
}

func packQuery(q *Query) []byte {
	p := make(packer, 0, 256+8*len(q.Hashes)+4*len(q.Tokens)+4*len(q.Partitions))
	p.fields(1 + count(q.BlockSize != 0, q.Tokens != nil, q.Hashes != nil, q.Hashed != nil, q.LoRA != "",
		q.CacheSalt != "", q.Workers != nil,
		q.Partitions != nil, len(q.MinSeq) > 0, q.Explain, q.Idle, q.L3 != "", q.L3TimeoutMS != 0))
	p.text("model")
	p.text(q.Model)
	if q.BlockSize != 0 {
		p.text("block_size")
		p.number(uint64(q.BlockSize))
	}
	if q.Tokens != nil {
		p.text("tokens")
		p.bin(4 * len(q.Tokens))
		for _, v := range q.Tokens {
			p = binary.LittleEndian.AppendUint32(p, v)
		}
	}
	if q.Hashes != nil {
		p.text("hashes")
		p.hashes(q.Hashes)
	}
	if q.Hashed != nil {
		p.text("hashed")
		p.array(len(q.Hashed))
		for i := range q.Hashed {
			p.fields(2)
			p.text("lookahead")
			p.number(uint64(q.Hashed[i].Lookahead))
			p.text("hashes")
			p.hashes(q.Hashed[i].Hashes)
		}
	}
	if q.LoRA != "" {
		p.text("lora_name")
		p.text(q.LoRA)
	}
	if q.CacheSalt != "" {
		p.text("cache_salt")
		p.text(q.CacheSalt)
	}
	if q.Workers != nil {
		p.text("workers")
		p.array(len(q.Workers))
		for _, w := range q.Workers {
			p.text(string(w))
		}
	}
	if q.Partitions != nil {
		p.text("partitions")
		p.partitions(q.Partitions)
	}
	if len(q.MinSeq) > 0 {
		p.text("min_seq")
		p.array(len(q.MinSeq))
		for _, m := range q.MinSeq {
			p.fields(2)
			p.text("partition")
			p.number(uint64(m.Partition))
			p.text("seq")
			p.number(uint64(m.Seq))
		}
	}
	if q.Explain {
		p.text("explain")
		p.truth(true)
	}
	if q.Idle {
		p.text("idle")
		p.truth(true)
	}
	if q.L3 != "" {
		p.text("l3")
		p.text(string(q.L3))
	}
	if q.L3TimeoutMS != 0 {
		p.text("l3_timeout_ms")
		p.number(uint64(q.L3TimeoutMS))
	}
	return p
}

func packAnswer(a *Answer) ([]byte, error) {
	if a.Blocks < 0 {
		return reflected(a)
	}
	p := make(packer, 0, 512+96*len(a.Workers)+48*len(a.Partitions)+12*(len(a.L3.Ranges)+len(a.L3.Unknown)))
	p.fields(7 + count(len(a.Lookaheads) > 0, len(a.Missing) > 0, a.Reason != ""))
	p.text("model")
	p.text(a.Model)
	p.text("block_size")
	p.number(uint64(a.BlockSize))
	p.text("blocks")
	p.number(uint64(a.Blocks))
	if len(a.Lookaheads) > 0 {
		p.text("lookaheads")
		p.array(len(a.Lookaheads))
		for _, v := range a.Lookaheads {
			p.number(uint64(v))
		}
	}
	p.text("complete")
	p.truth(a.Complete)
	if len(a.Missing) > 0 {
		p.text("missing")
		p.partitions(a.Missing)
	}
	p.text("workers")
	if a.Workers == nil {
		p.none()
	} else {
		p.array(len(a.Workers))
	}
	for i := range a.Workers {
		if err := p.overlap(&a.Workers[i]); err != nil {
			return nil, err
		}
	}
	p.text("partitions")
	if a.Partitions == nil {
		p.none()
	} else {
		p.array(len(a.Partitions))
	}
	for i := range a.Partitions {
		p.status(&a.Partitions[i])
	}
	if a.Reason != "" {
		p.text("reason")
		p.text(string(a.Reason))
	}
	p.text("l3")
	return p, p.l3(&a.L3)
}

func (p *packer) status(s *PartitionStatus) {
	p.fields(3 + count(s.StaleMS != 0, s.ResyncNeeded))
	p.text("partition")
	p.number(uint64(s.Partition))
	p.text("epoch")
	p.time(s.Epoch)
	p.text("seq")
	p.number(uint64(s.Seq))
	if s.StaleMS != 0 {
		p.text("stale_ms")
		p.number(s.StaleMS)
	}
	if s.ResyncNeeded {
		p.text("resync_needed")
		p.truth(true)
	}
}

func (p *packer) overlap(o *Overlap) error {
	p.fields(7 + count(o.L3Stop != "", o.Path != nil, o.Bound != "", o.Engine != "", o.CatchingUp))
	p.text("instance")
	p.text(string(o.Instance))
	// Answers are made of these: the keys are written with their heads.
	b := *p
	b = appendNumber(append(b, "\xa4rank"...), uint64(o.Rank))
	b = appendNumber(append(b, "\xa6device"...), uint64(o.Device))
	b = appendNumber(append(b, "\xa4host"...), uint64(o.Host))
	b = appendNumber(append(b, "\xa4disk"...), uint64(o.Disk))
	b = appendNumber(append(b, "\xa8external"...), uint64(o.External))
	*p = appendNumber(append(b, "\xa2l3"...), uint64(o.L3))
	if o.L3Stop != "" {
		p.text("l3_stop")
		p.text(o.L3Stop)
	}
	if o.Path != nil {
		p.text("path")
		if err := p.rare(o.Path); err != nil {
			return err
		}
	}
	if o.Bound != "" {
		p.text("bound")
		p.text(string(o.Bound))
	}
	if o.Engine != "" {
		p.text("engine")
		p.text(string(o.Engine))
	}
	if o.CatchingUp {
		p.text("catching_up")
		p.truth(true)
	}
	return nil
}

func (p *packer) l3(l *L3) error {
	p.fields(4 + count(l.Reason != "", len(l.Ranges) > 0, len(l.Unknown) > 0, len(l.Broken) > 0))
	p.text("status")
	p.text(string(l.Status))
	if l.Reason != "" {
		p.text("reason")
		p.text(l.Reason)
	}
	if len(l.Ranges) > 0 {
		p.text("ranges")
		p.ranges(l.Ranges)
	}
	p.text("total")
	p.number(uint64(l.Total))
	p.text("age_ms")
	p.float(l.AgeMS)
	if len(l.Unknown) > 0 {
		p.text("unknown")
		p.ranges(l.Unknown)
	}
	if len(l.Broken) > 0 {
		p.text("broken")
		if err := p.rare(l.Broken); err != nil {
			return err
		}
	}
	p.text("from_start")
	p.number(uint64(l.FromStart))
	return nil
}

// rare writes what is asked for by people alone.
func (p *packer) rare(v any) error {
	b, err := reflected(v)
	*p = append(*p, b...)
	return err
}
