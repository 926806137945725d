package bpe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/unicode/norm"
)

// MaxFile bounds the bytes of a file.
const MaxFile = 128 << 20

// Tokenizer converts text to tokens.
type Tokenizer struct {
	vocab  map[string]uint32 // pieces, as bytes
	bytes  [256]uint32
	merges map[pair]merge
	whole  bool // ignore_merges

	nfc           bool
	matchers      []matcher
	raw, normal   added // tokens that are matched before normalization, and after
	before, after []uint32
}

type pair struct{ a, b uint32 }

type merge struct{ rank, to uint32 }

// file is the JSON of a tokenizer.json.
type file struct {
	Version       string          `json:"version"`
	Truncation    json.RawMessage `json:"truncation"`
	Padding       json.RawMessage `json:"padding"`
	Added         []addedToken    `json:"added_tokens"`
	Normalizer    *step           `json:"normalizer"`
	PreTokenizer  *step           `json:"pre_tokenizer"`
	PostProcessor *step           `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         struct {
		Type         string            `json:"type"`
		Dropout      *float64          `json:"dropout"`
		Unknown      *string           `json:"unk_token"`
		Prefix       string            `json:"continuing_subword_prefix"`
		Suffix       string            `json:"end_of_word_suffix"`
		FuseUnknown  bool              `json:"fuse_unk"`
		ByteFallback bool              `json:"byte_fallback"`
		IgnoreMerges bool              `json:"ignore_merges"`
		Vocab        map[string]uint32 `json:"vocab"`
		Merges       []json.RawMessage `json:"merges"`
	} `json:"model"`
}

// step is a normalizer, pre-tokenizer or post-processor.
type step struct {
	Type          string `json:"type"`
	Normalizers   []step `json:"normalizers"`
	PreTokenizers []step `json:"pretokenizers"`
	Processors    []step `json:"processors"`

	Pattern  struct{ Regex string } `json:"pattern"`
	Behavior string                 `json:"behavior"`
	Invert   bool                   `json:"invert"`

	AddPrefixSpace bool `json:"add_prefix_space"`
	UseRegex       bool `json:"use_regex"`

	Single []struct {
		SpecialToken *struct {
			ID string `json:"id"`
		}
		Sequence *struct {
			ID string `json:"id"`
		}
	} `json:"single"`
	SpecialTokens map[string]struct {
		IDs []uint32 `json:"ids"`
	} `json:"special_tokens"`
}

// New parses a tokenizer.json. The error names the first unsupported part.
func New(data []byte) (*Tokenizer, error) {
	if len(data) > MaxFile {
		return nil, fmt.Errorf("the file has %d bytes, more than %d", len(data), MaxFile)
	}
	var f file
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("not a tokenizer.json: %w", err)
	}
	t := &Tokenizer{whole: f.Model.IgnoreMerges}
	for _, read := range []func(*file) error{t.readModel, t.readAdded, t.readNormalizer, t.readPattern, t.readTemplate} {
		if err := read(&f); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func given(v json.RawMessage) bool { return len(v) > 0 && string(v) != "null" }

func (t *Tokenizer) readModel(f *file) error {
	m := &f.Model
	switch {
	case given(f.Truncation) || given(f.Padding):
		return errors.New("truncation or padding is set")
	case m.Type != "BPE":
		return fmt.Errorf("the model is %.40q, not BPE", m.Type)
	case m.Dropout != nil || m.Unknown != nil || m.Prefix != "" || m.Suffix != "" || m.FuseUnknown || m.ByteFallback:
		return errors.New("the model is not byte-level BPE: it has dropout, an unknown token, a prefix or a suffix")
	}
	unit, of := byteUnits()
	t.vocab = make(map[string]uint32, len(m.Vocab))
	for token, id := range m.Vocab {
		text := make([]byte, 0, len(token))
		for _, r := range token {
			b, ok := of[r]
			if !ok { // the text of an added token, which no piece equals
				text = nil
				break
			}
			text = append(text, b)
		}
		if text != nil {
			t.vocab[string(text)] = id
		}
	}
	for b := range 256 {
		id, ok := m.Vocab[string(unit[b])]
		if !ok {
			return fmt.Errorf("the vocabulary lacks byte %#x", b)
		}
		t.bytes[b] = id
	}
	t.merges = make(map[pair]merge, len(m.Merges))
	for rank, raw := range m.Merges {
		var parts [2]string
		var text string
		if json.Unmarshal(raw, &text) == nil {
			var ok bool
			if parts[0], parts[1], ok = strings.Cut(text, " "); !ok {
				return fmt.Errorf("merge %d is %.40q, not two tokens", rank, text)
			}
		} else if err := json.Unmarshal(raw, &parts); err != nil {
			return fmt.Errorf("merge %d: %w", rank, err)
		}
		a, okA := m.Vocab[parts[0]]
		b, okB := m.Vocab[parts[1]]
		to, ok := m.Vocab[parts[0]+parts[1]]
		if !okA || !okB || !ok {
			return fmt.Errorf("merge %d is of tokens that the vocabulary lacks", rank)
		}
		t.merges[pair{a, b}] = merge{uint32(rank), to}
	}
	return nil
}

// byteUnits returns the code points that represent bytes in a vocabulary (GPT-2's bytes_to_unicode).
func byteUnits() (unit [256]rune, of map[rune]byte) {
	of = make(map[rune]byte, 256)
	next := rune(256)
	for b := range 256 {
		r := rune(b)
		if !('!' <= r && r <= '~' || 0xa1 <= r && r <= 0xac || 0xae <= r && r <= 0xff) {
			r = next
			next++
		}
		unit[b], of[r] = r, byte(b)
	}
	return unit, of
}

func (t *Tokenizer) readAdded(f *file) error {
	for _, a := range f.Added {
		id, known := f.Model.Vocab[a.Content]
		switch {
		case a.Content == "":
			return fmt.Errorf("added token %d is empty", a.ID)
		case known && id != a.ID:
			return fmt.Errorf("added token %.40q has id %d, but id %d in the vocabulary", a.Content, a.ID, id)
		case a.Normalized && f.Normalizer != nil && norm.NFC.String(a.Content) != a.Content:
			return fmt.Errorf("added token %.40q is not in the form NFC", a.Content)
		case a.Normalized:
			t.normal.add(a)
		default:
			t.raw.add(a)
		}
	}
	return errors.Join(t.normal.check(), t.raw.check())
}

func (t *Tokenizer) readNormalizer(f *file) error {
	n := f.Normalizer
	if n == nil {
		return nil
	}
	list := []step{*n}
	if n.Type == "Sequence" {
		list = n.Normalizers
	}
	for _, n := range list {
		if n.Type != "NFC" {
			return fmt.Errorf("normalizer %.40q is not supported", n.Type)
		}
		t.nfc = true
	}
	return nil
}

func (t *Tokenizer) readPattern(f *file) error {
	p := f.PreTokenizer
	if p == nil || p.Type != "Sequence" || len(p.PreTokenizers) < 2 {
		return errors.New("the pre-tokenizer is not a sequence of patterns and ByteLevel")
	}
	last := len(p.PreTokenizers) - 1
	for _, s := range p.PreTokenizers[:last] {
		match := patterns[s.Pattern.Regex]
		if s.Type != "Split" || s.Behavior != "Isolated" || s.Invert || match == nil {
			return fmt.Errorf("the pre-tokenizer %.20q has an unsupported pattern: %.200q", s.Type, s.Pattern.Regex)
		}
		t.matchers = append(t.matchers, match)
	}
	if s := p.PreTokenizers[last]; s.Type != "ByteLevel" || s.AddPrefixSpace || s.UseRegex {
		return fmt.Errorf("the pre-tokenizer ends with %.20q, or splits or adds spaces there", s.Type)
	}
	return nil
}

func (t *Tokenizer) readTemplate(f *file) error {
	if f.PostProcessor == nil {
		return nil
	}
	list := []step{*f.PostProcessor}
	if list[0].Type == "Sequence" {
		list = list[0].Processors
	}
	templates := 0
	for _, p := range list {
		switch p.Type {
		case "ByteLevel": // ByteLevel changes only offsets
			continue
		case "TemplateProcessing":
		default:
			return fmt.Errorf("post-processor %.40q is not supported", p.Type)
		}
		if templates++; templates > 1 {
			return errors.New("the post-processor has two templates")
		}
		sequences := 0
		for _, part := range p.Single {
			switch {
			case part.SpecialToken != nil && sequences == 0:
				t.before = append(t.before, p.SpecialTokens[part.SpecialToken.ID].IDs...)
			case part.SpecialToken != nil:
				t.after = append(t.after, p.SpecialTokens[part.SpecialToken.ID].IDs...)
			default:
				sequences++
			}
		}
		if sequences != 1 {
			return fmt.Errorf("the template contains the prompt %d times", sequences)
		}
	}
	return nil
}

// Encode appends the tokens of a UTF-8 text, with the tokens that the template adds around it. It ends early with the
// context's error.
func (t *Tokenizer) Encode(ctx context.Context, to []uint32, text string) ([]uint32, error) {
	to, err := t.EncodeText(ctx, append(to, t.before...), text, nil)
	return append(to, t.after...), err
}

// Memory caches the tokens of parts of texts: parts between added tokens, which are independent of their surroundings.
type Memory interface {
	Get(part string) ([]uint32, bool) // the caller must not modify the result
	Add(part string, ids []uint32)    // must not retain ids
}

// remembered is the minimum size of a cached part, in bytes.
const remembered = 64

// EncodeText appends the tokens of a text alone (add_special_tokens=False). parts may be nil.
func (t *Tokenizer) EncodeText(ctx context.Context, to []uint32, text string, parts Memory) ([]uint32, error) {
	m := merger{work: work{ctx: ctx}, t: t}
	token := func(id uint32) { to = append(to, id) }
	piece := func(s string) bool {
		to = m.merge(to, s)
		return m.err == nil
	}
	err := t.raw.split(&m.work, text, func(s string) (err error) {
		if part := s; parts != nil && len(part) >= remembered {
			if ids, has := parts.Get(part); has {
				to = append(to, ids...)
				return nil
			}
			from := len(to)
			defer func() {
				if err == nil {
					parts.Add(part, to[from:])
				}
			}()
		}
		if t.nfc {
			if s, err = m.nfc(s); err != nil {
				return err
			}
		}
		return t.normal.split(&m.work, s, func(s string) error {
			t.pieces(&m.work, s, 0, piece)
			return m.err
		}, token)
	}, token)
	return to, err
}

// segmentBytes is the part of a text that is normalized between two steps.
const segmentBytes = 16 << 10

// nfc returns a text in the form NFC. It splits the text at code points that do not combine with earlier code points.
func (w *work) nfc(s string) (string, error) {
	var out []byte
	from := 0 // start of the text that is not in out
	for at := 0; at < len(s); {
		end := min(len(s), at+segmentBytes)
		for ; end < len(s) && !(utf8.RuneStart(s[end]) && norm.NFC.PropertiesString(s[end:]).BoundaryBefore()); end++ {
			if !w.step() {
				return "", w.err
			}
		}
		if w.left -= segmentBytes; !w.step() {
			return "", w.err
		}
		if part := s[at:end]; !norm.NFC.IsNormalString(part) {
			n := norm.NFC.String(part)
			if strings.Count(n, "\u034f") > strings.Count(part, "\u034f") {
				return "", errors.New("the text has more than 30 combining characters in a row")
			}
			out = append(append(out, s[from:at]...), n...)
			from = end
		}
		at = end
	}
	if from == 0 {
		return s, nil
	}
	return string(append(out, s[from:]...)), nil
}

// pieces splits a text by the patterns from index from on, until piece returns false. It reports whether piece always
// returned true.
func (t *Tokenizer) pieces(w *work, s string, from int, piece func(string) bool) bool {
	if from == len(t.matchers) {
		return piece(s)
	}
	return split(w, s, t.matchers[from], func(s string) bool { return t.pieces(w, s, from+1, piece) })
}

// merger merges the bytes of pieces. It reuses its slices.
type merger struct {
	work
	t     *Tokenizer
	parts []part
	heap  []uint64 // rank and position of a pair, the lowest first; merged pairs stay until they are popped
}

// part is a token of a piece, in a linked list.
type part struct {
	id         uint32
	prev, next int32  // -1: end of the list
	rank       uint32 // of the pair with the next part; math.MaxUint32 without a merge
	to         uint32 // the merged token
}

// work counts the steps of one text.
type work struct {
	ctx  context.Context
	left int   // steps until the next check of the context
	err  error // error of the context; it invalidates the result
}

// stepsPerCheck steps last less than a millisecond.
const stepsPerCheck = 4096

// step counts a step. It returns false if the work must end.
func (w *work) step() bool {
	if w.left--; w.left >= 0 {
		return true
	}
	if w.err == nil {
		w.left, w.err = stepsPerCheck, w.ctx.Err()
	}
	return w.err == nil
}

// merge appends the tokens of one piece. It stops when the context ends.
func (m *merger) merge(to []uint32, s string) []uint32 {
	if !m.step() {
		return to
	}
	if id, ok := m.t.vocab[s]; ok && m.t.whole {
		return append(to, id)
	}
	m.parts, m.heap = slices.Grow(m.parts[:0], len(s)), m.heap[:0]
	for i := range len(s) {
		if !m.step() {
			return to
		}
		m.parts = append(m.parts, part{id: m.t.bytes[s[i]], prev: int32(i) - 1, next: int32(i) + 1})
	}
	m.parts[len(s)-1].next = -1
	for i := range m.parts {
		if m.pair(int32(i)); !m.step() {
			return to
		}
	}
	for len(m.heap) > 0 {
		if !m.step() {
			return to
		}
		top := m.pop()
		at := int32(uint32(top))
		p := &m.parts[at]
		if p.rank != uint32(top>>32) { // the pair is merged, or has changed
			continue
		}
		next := &m.parts[p.next]
		p.id, p.next = p.to, next.next
		next.rank = math.MaxUint32
		if p.next >= 0 {
			m.parts[p.next].prev = at
		}
		m.pair(at)
		if p.prev >= 0 {
			m.pair(p.prev)
		}
	}
	for at := int32(0); at >= 0; at = m.parts[at].next {
		to = append(to, m.parts[at].id)
	}
	return to
}

// pair computes the merge of the pair at an index, and pushes it to the heap.
func (m *merger) pair(at int32) {
	p := &m.parts[at]
	p.rank = math.MaxUint32
	if p.next < 0 {
		return
	}
	if x, ok := m.t.merges[pair{p.id, m.parts[p.next].id}]; ok {
		p.rank, p.to = x.rank, x.to
		m.push(uint64(x.rank)<<32 | uint64(at))
	}
}

func (m *merger) push(v uint64) {
	h := append(m.heap, v)
	i := len(h) - 1
	for i > 0 && h[(i-1)/2] > v {
		h[i] = h[(i-1)/2]
		i = (i - 1) / 2
	}
	h[i] = v
	m.heap = h
}

func (m *merger) pop() uint64 {
	h := m.heap
	top, v := h[0], h[len(h)-1]
	h = h[:len(h)-1]
	i := 0
	for len(h) > 0 {
		child := 2*i + 1
		if child >= len(h) {
			break
		}
		if child+1 < len(h) && h[child+1] < h[child] {
			child++
		}
		if h[child] >= v {
			break
		}
		h[i] = h[child]
		i = child
	}
	if len(h) > 0 {
		h[i] = v
	}
	m.heap = h
	return top
}
