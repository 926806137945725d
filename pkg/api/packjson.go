package api

import (
	"encoding/json"
	"math"
	"strconv"
	"time"
	"unicode/utf8"
)

// Answers and choices in JSON are encoded by hand too. The bytes equal the output of encoding/json, as a test and a
// fuzzer check. Rare values use encoding/json.

// jsonPacker appends values to out. Names include the text around them: `,"rank":`. After an error, encoding/json
// encodes or refuses the value.
type jsonPacker struct {
	out []byte
	err error
}

// jsonAnswer encodes an answer. It returns false for an answer that encoding/json must encode.
func jsonAnswer(a *Answer) ([]byte, bool) {
	room := 512 + 128*len(a.Workers) + 96*len(a.Partitions) + 24*(len(a.L3.Ranges)+len(a.L3.Unknown))
	if a.Tokenization != nil {
		room += 11 * len(a.TokenIDs)
	}
	p := jsonPacker{out: make([]byte, 0, room)}
	p.putText(`{"model":`, a.Model)
	p.putNumber(`,"block_size":`, uint64(a.BlockSize))
	p.putInt(`,"blocks":`, a.Blocks)
	putNumbers(&p, `,"lookaheads":`, a.Lookaheads, len(a.Lookaheads) > 0)
	p.putTruth(`,"complete":`, a.Complete)
	putNumbers(&p, `,"missing":`, a.Missing, len(a.Missing) > 0)
	p.listHead(`,"workers":`, a.Workers == nil)
	for i := range a.Workers {
		p.comma(i)
		p.overlap(&a.Workers[i])
	}
	p.listEnd(a.Workers == nil)
	p.optReflect(`,"by_endpoint":`, a.ByEndpoint, len(a.ByEndpoint) > 0)
	p.optReflect(`,"unknown_endpoints":`, a.UnknownEndpoints, len(a.UnknownEndpoints) > 0)
	p.listHead(`,"partitions":`, a.Partitions == nil)
	for i := range a.Partitions {
		p.comma(i)
		p.status(&a.Partitions[i])
	}
	p.listEnd(a.Partitions == nil)
	p.optText(`,"reason":`, string(a.Reason))
	p.l3(&a.L3)
	p.optReflect(`,"regions":`, a.Regions, len(a.Regions) > 0)
	if t := a.Tokenization; t != nil {
		p.putTruth(`,"tokenized":`, t.Tokenized)
		p.optText(`,"tokenize_error":`, t.TokenizeError)
		p.putInt(`,"prompt_tokens":`, t.PromptTokens)
		putNumbers(&p, `,"token_ids":`, t.TokenIDs, t.TokenIDs != nil)
		p.optReflect(`,"unsupported_fields":`, t.UnsupportedFields, len(t.UnsupportedFields) > 0)
	}
	p.raw(`}`)
	return p.out, p.err == nil
}

// jsonSelection encodes a usual choice. It returns false for a choice that encoding/json must encode.
func jsonSelection(s *Selection) ([]byte, bool) {
	p := jsonPacker{out: make([]byte, 0, 640+len(s.Model)+len(s.RequestID)+len(s.Worker)+len(s.Endpoint)+len(s.Policy))}
	p.putText(`{"model":`, s.Model)
	p.putNumber(`,"block_size":`, uint64(s.BlockSize))
	p.putInt(`,"blocks":`, s.Blocks)
	p.putNumber(`,"isl_tokens":`, s.ISLTokens)
	p.optText(`,"request_id":`, s.RequestID)
	p.putTruth(`,"booked":`, s.Booked)
	p.putText(`,"worker":`, string(s.Worker))
	p.putNumber(`,"rank":`, uint64(s.Rank))
	p.optText(`,"endpoint":`, s.Endpoint)
	p.putNumber(`,"device":`, uint64(s.Device))
	p.putNumber(`,"host":`, uint64(s.Host))
	p.putNumber(`,"disk":`, uint64(s.Disk))
	p.putNumber(`,"external":`, uint64(s.External))
	p.putNumber(`,"l3":`, uint64(s.L3))
	p.optNumber(`,"guessed":`, uint64(s.Guessed))
	p.putText(`,"policy":`, s.Policy)
	p.putInt(`,"candidates":`, s.Candidates)
	p.putFloat(`,"cost":`, s.Cost)
	p.putFloat(`,"probability":`, s.Probability)
	p.putNumber(`,"required_blocks":`, s.RequiredBlocks)
	p.putFloat(`,"effective_overlap":`, s.EffectiveOverlap)
	p.putNumber(`,"cached_tokens":`, s.CachedTokens)
	p.putNumber(`,"effective_prefill_tokens":`, s.EffectivePrefillTokens)
	p.putTruth(`,"track_prefill_tokens":`, s.TrackPrefillTokens)
	p.putNumber(`,"potential_decode_blocks":`, s.PotentialDecodeBlocks)
	p.putTruth(`,"complete":`, s.Complete)
	p.raw(`}`)
	return p.out, p.err == nil
}

func (p *jsonPacker) overlap(o *Overlap) {
	p.putText(`{"instance":`, string(o.Instance))
	// An answer consists mostly of these six fields, which are appended without a write to p for each.
	b := strconv.AppendUint(append(p.out, `,"rank":`...), uint64(o.Rank), 10)
	b = strconv.AppendUint(append(b, `,"device":`...), uint64(o.Device), 10)
	b = strconv.AppendUint(append(b, `,"host":`...), uint64(o.Host), 10)
	b = strconv.AppendUint(append(b, `,"disk":`...), uint64(o.Disk), 10)
	b = strconv.AppendUint(append(b, `,"external":`...), uint64(o.External), 10)
	p.out = strconv.AppendUint(append(b, `,"l3":`...), uint64(o.L3), 10)
	p.optText(`,"l3_stop":`, o.L3Stop)
	p.optReflect(`,"path":`, o.Path, o.Path != nil)
	p.optText(`,"bound":`, string(o.Bound))
	p.optText(`,"engine":`, string(o.Engine))
	p.optTrue(`,"catching_up":`, o.CatchingUp)
	p.optNumber(`,"guessed":`, uint64(o.Guessed))
	p.optText(`,"endpoint":`, o.Endpoint)
	putNumbers(p, `,"within":`, o.Within, len(o.Within) > 0)
	p.optReflect(`,"engine_hashes":`, o.EngineHashes, len(o.EngineHashes) > 0)
	p.optNumber(`,"held":`, uint64(o.Held))
	p.optNumber(`,"full":`, uint64(o.Full))
	p.raw(`}`)
}

func (p *jsonPacker) status(s *PartitionStatus) {
	p.putNumber(`{"partition":`, uint64(s.Partition))
	p.putTime(`,"epoch":`, s.Epoch)
	p.putNumber(`,"seq":`, uint64(s.Seq))
	p.optNumber(`,"stale_ms":`, s.StaleMS)
	p.optTrue(`,"resync_needed":`, s.ResyncNeeded)
	p.raw(`}`)
}

func (p *jsonPacker) l3(l *L3) {
	p.putText(`,"l3":{"status":`, string(l.Status))
	p.optText(`,"reason":`, l.Reason)
	p.optRanges(`,"ranges":`, l.Ranges)
	p.putNumber(`,"total":`, uint64(l.Total))
	p.putFloat(`,"age_ms":`, l.AgeMS)
	p.optRanges(`,"unknown":`, l.Unknown)
	p.optReflect(`,"broken":`, l.Broken, len(l.Broken) > 0)
	p.putNumber(`,"from_start":`, uint64(l.FromStart))
	p.raw(`}`)
}

func (p *jsonPacker) raw(s string) { p.out = append(p.out, s...) }

// comma separates element i of a list from the previous element.
func (p *jsonPacker) comma(i int) {
	if i > 0 {
		p.raw(`,`)
	}
}

// listHead begins a list, or writes null. The elements and listEnd must follow.
func (p *jsonPacker) listHead(name string, null bool) {
	p.raw(name)
	if null {
		p.raw(`null`)
	} else {
		p.raw(`[`)
	}
}

func (p *jsonPacker) listEnd(null bool) {
	if !null {
		p.raw(`]`)
	}
}

func (p *jsonPacker) putNumber(name string, v uint64) {
	p.out = strconv.AppendUint(append(p.out, name...), v, 10)
}
func (p *jsonPacker) putInt(name string, v int) {
	p.out = strconv.AppendInt(append(p.out, name...), int64(v), 10)
}
func (p *jsonPacker) putTruth(name string, v bool) {
	p.out = strconv.AppendBool(append(p.out, name...), v)
}

// putText appends a text. encoding/json encodes texts with characters to escape.
func (p *jsonPacker) putText(name, s string) {
	p.raw(name)
	for i := range len(s) {
		switch c := s[i]; {
		case c < ' ', c >= utf8.RuneSelf, c == '"', c == '\\', c == '<', c == '>', c == '&':
			p.reflect(s)
			return
		}
	}
	p.out = append(append(append(p.out, '"'), s...), '"')
}

// putFloat appends a number. encoding/json encodes numbers with an exponent, and refuses numbers that JSON lacks.
func (p *jsonPacker) putFloat(name string, v float64) {
	p.raw(name)
	if abs := math.Abs(v); abs == 0 || 1e-6 <= abs && abs < 1e21 {
		p.out = strconv.AppendFloat(p.out, v, 'f', -1, 64)
	} else {
		p.reflect(v)
	}
}

func (p *jsonPacker) putTime(name string, t time.Time) {
	out, err := t.AppendText(append(append(p.out, name...), '"'))
	if err != nil {
		p.err = err
		return
	}
	p.out = append(out, '"')
}

func (p *jsonPacker) reflect(v any) {
	text, err := json.Marshal(v)
	if err != nil {
		p.err = err
	}
	p.out = append(p.out, text...)
}

// The following functions append a field, unless the value is zero or not given.

func (p *jsonPacker) optText(name, s string) {
	if s != "" {
		p.putText(name, s)
	}
}

func (p *jsonPacker) optNumber(name string, v uint64) {
	if v != 0 {
		p.putNumber(name, v)
	}
}

func (p *jsonPacker) optTrue(name string, v bool) {
	if v {
		p.putTruth(name, v)
	}
}

func (p *jsonPacker) optRanges(name string, list [][2]uint32) {
	for i, r := range list {
		if i == 0 {
			p.listHead(name, false)
		}
		p.comma(i)
		p.putNumber(`[`, uint64(r[0]))
		p.putNumber(`,`, uint64(r[1]))
		p.raw(`]`)
	}
	p.listEnd(len(list) == 0)
}

func (p *jsonPacker) optReflect(name string, v any, given bool) {
	if given {
		p.raw(name)
		p.reflect(v)
	}
}

func putNumbers[T ~uint32](p *jsonPacker, name string, list []T, given bool) {
	if !given {
		return
	}
	p.listHead(name, false)
	for i, v := range list {
		p.comma(i)
		p.out = strconv.AppendUint(p.out, uint64(v), 10)
	}
	p.raw(`]`)
}
