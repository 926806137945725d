package trace

import (
	"bufio"
	"bytes"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/zeebo/xxh3"
)

// Format is a form of trace files. The zero value detects the form from the file.
type Format string

// The formats, with the programs that read them. Formats of texts have no tokens: a token is taken to be
// [textBytes] bytes. Formats without times get a request a second.
const (
	// Mooncake is the format of this package; see the package comment.
	Mooncake Format = "mooncake"

	// VLLMTimed is the dataset timed_trace of `vllm bench serve` (vllm 0.33.0, vllm/benchmarks/datasets/datasets.py,
	// TimedTrace): Mooncake's fields with times in seconds, and by default 16 tokens for a hash id. Files of
	// alibaba-edu/qwen-bailian-usagetraces-anon have this form, with chat_id and parent_chat_id.
	VLLMTimed Format = "vllm-timed"

	// VLLMCustom is the dataset custom of `vllm bench serve` (CustomDataset in the same file): a JSON object with prompt
	// and output_tokens on each line.
	VLLMCustom Format = "vllm-custom"

	// ShareGPT is the dataset sharegpt of `vllm bench serve` and of inference-perf: an array of conversations. As in both
	// programs, a request is the first turn of a conversation.
	ShareGPT Format = "sharegpt"

	// Azure is the trace of llm-d's inference-perf (kubernetes-sigs/inference-perf, inference_perf/utils/trace_reader.py,
	// AzurePublicDatasetReader): a CSV file with time, prompt tokens and output tokens. No prompts share a prefix.
	Azure Format = "azure"

	// Weka is the trace weka_trace_replay of inference-perf (inference_perf/datagen/replay/weka_trace_replay_datagen.py):
	// a JSON object for each session, with the requests of its agents. Hash ids belong to the session.
	Weka Format = "weka"
)

// Formats lists the formats.
var Formats = []Format{Mooncake, VLLMTimed, VLLMCustom, ShareGPT, Azure, Weka}

const (
	// textBytes is the assumed number of bytes of a token of text.
	textBytes = 4

	// lastTokens bounds the tokens at the end of a prompt that need no hash id: a block of most engines.
	lastTokens = 128

	// timedTokens is the default number of tokens of a hash id of VLLMTimed.
	timedTokens = 16

	// maxTrace bounds a trace that must be in memory as a whole, in bytes.
	maxTrace = 2 << 30
)

// Imported is a trace of any format.
type Imported struct {
	Requests []Request
	Format   Format
	Tokens   int  // of a hash id
	Untimed  bool // the file has no times
	Texts    bool // lengths are estimates from texts

	texts map[uint64]uint64 // ids of parts of texts, by hash
}

// ImportFile reads the first limit requests of a file, or all if limit is 0. An empty format is detected. Requests are
// sorted by time, and times begin at 0. An error names the file and the place.
func ImportFile(path string, format Format, limit int) (*Imported, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	defer f.Close()
	t, err := Import(f, format, limit)
	if err != nil {
		return nil, fmt.Errorf("read trace: %s: %w", path, err)
	}
	return t, nil
}

// Import is [ImportFile] from a reader.
func Import(r io.Reader, format Format, limit int) (*Imported, error) {
	b := bufio.NewReaderSize(r, 64<<10)
	if format == "" {
		head, err := b.Peek(64 << 10)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		if format = detect(head); format == "" {
			return nil, fmt.Errorf("%w: the form of the file is none of %v", ErrFormat, Formats)
		}
	}
	t := &Imported{Format: format, Tokens: BlockTokens}
	var err error
	switch in := io.LimitReader(b, maxTrace); format {
	case Mooncake:
		t.Requests, err = Read(b, limit)
	case VLLMTimed:
		t.Tokens = timedTokens
		err = t.lines(b, limit, t.timed())
	case VLLMCustom:
		err = t.lines(b, limit, t.custom)
	case ShareGPT:
		err = t.shareGPT(in, limit)
	case Azure:
		err = t.azure(b, limit)
	case Weka:
		err = t.weka(in, limit)
	default:
		err = fmt.Errorf("format %q is none of %v", format, Formats)
	}
	if err != nil {
		return nil, err
	}
	slices.SortStableFunc(t.Requests, func(a, b Request) int { return int(a.Timestamp - b.Timestamp) })
	for i := range t.Requests {
		if t.Untimed {
			t.Requests[i].Timestamp = int64(i) * 1000
		}
	}
	if len(t.Requests) > 0 {
		for i, first := 0, t.Requests[0].Timestamp; i < len(t.Requests); i++ {
			t.Requests[i].Timestamp -= first
		}
	}
	return t, nil
}

// CheckTokens returns an error if the numbers of hash ids of most requests do not fit the lengths of the prompts at so
// many tokens a hash id. A request may have no ids, and need not have an id for the last tokens, less than a block of
// the engine. Only the formats with ids and lengths of whole prompts are checked.
func (t *Imported) CheckTokens(tokens int) error {
	if t.Format != Mooncake && t.Format != VLLMTimed || tokens < 1 {
		return nil
	}
	wrong, of := 0, 0
	var sizes []int // of the requests: tokens of the prompt for each id, hardly less than the tokens of an id
	for i := range t.Requests {
		length, ids := t.Requests[i].InputLength, len(t.Requests[i].HashIDs)
		if ids == 0 {
			continue
		}
		of++
		if ids < (max(0, length-lastTokens)+tokens-1)/tokens || ids > (length+tokens-1)/tokens {
			wrong++
		}
		sizes = append(sizes, (length+ids-1)/ids)
	}
	if 2*wrong <= of {
		return nil
	}
	slices.Sort(sizes)
	return fmt.Errorf("%d of %d requests have another number of hash ids than ceil(input_length / %d); an id stands for "+
		"about %d tokens: give the number with --block-tokens, or the format with --trace-format (%s: %d tokens, %s: %d)",
		wrong, of, tokens, sizes[len(sizes)*19/20], Mooncake, BlockTokens, VLLMTimed, timedTokens)
}

// detect returns the format of a file from its first bytes; empty: unknown.
func detect(head []byte) Format {
	head = bytes.TrimSpace(head)
	if len(head) == 0 {
		return Mooncake // an empty trace
	}
	if head[0] == '[' {
		if bytes.Contains(head, []byte(`"conversations"`)) {
			return ShareGPT
		}
		if bytes.Contains(head, []byte(`"block_size"`)) {
			return Weka
		}
		return ""
	}
	line, _, _ := bytes.Cut(head, []byte("\n"))
	if head[0] != '{' {
		if bytes.Count(line, []byte(",")) == 2 {
			return Azure
		}
		return ""
	}
	var fields map[string]json.RawMessage
	if json.Unmarshal(line, &fields) != nil { // an object of several lines
		if bytes.Contains(head, []byte(`"block_size"`)) {
			return Weka
		}
		return ""
	}
	has := func(name string) bool { return fields[name] != nil }
	switch {
	case has("requests") && has("block_size"):
		return Weka
	case has("prompt"):
		return VLLMCustom
	case has("chat_id"), has("hash_ids") && bytes.ContainsRune(fields["timestamp"], '.'):
		return VLLMTimed
	case has("hash_ids"), has("input_length"):
		return Mooncake
	}
	return ""
}

// lines calls add with every line that is not empty.
func (t *Imported) lines(r io.Reader, limit int, add func(line []byte) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), 16*MaxLine) // texts are longer than ids
	for n := 1; lines.Scan(); n++ {
		if blank(lines.Bytes()) {
			continue
		}
		if err := add(lines.Bytes()); err != nil {
			return fmt.Errorf("line %d: %w: %w", n, ErrFormat, err)
		}
		if len(t.Requests) == limit {
			break
		}
	}
	return lines.Err()
}

// timed returns the function for lines of VLLMTimed. A chat with a parent belongs to the session of its parent.
func (t *Imported) timed() func([]byte) error {
	sessions := map[int64]string{}
	return func(b []byte) error {
		var l struct {
			Timestamp *float64 `json:"timestamp"`
			Input     *int     `json:"input_length"`
			Output    *int     `json:"output_length"`
			HashIDs   []uint64 `json:"hash_ids"`
			Chat      *int64   `json:"chat_id"`
			Parent    *int64   `json:"parent_chat_id"`
		}
		if err := json.Unmarshal(b, &l); err != nil {
			return err
		}
		if l.Timestamp == nil || l.Input == nil || l.Output == nil {
			return errors.New("timestamp, input_length or output_length is missing")
		}
		r := Request{Timestamp: milliseconds(*l.Timestamp), InputLength: *l.Input, OutputLength: *l.Output,
			HashIDs: l.HashIDs}
		if l.Chat != nil {
			session := strconv.FormatInt(*l.Chat, 10)
			if l.Parent != nil && sessions[*l.Parent] != "" {
				session = sessions[*l.Parent]
			}
			sessions[*l.Chat], r.SessionID = session, session
		}
		return t.add(r)
	}
}

func milliseconds(seconds float64) int64 { return int64(math.Round(1000 * seconds)) }

// add checks a request and appends it. A prompt without hash ids gets unique ids.
func (t *Imported) add(r Request) error {
	const most = 1 << 28 // tokens
	if r.InputLength < 0 || r.OutputLength < 0 || r.InputLength > most || r.OutputLength > most {
		return fmt.Errorf("lengths %d and %d are not from 0 to %d", r.InputLength, r.OutputLength, most)
	}
	t.Requests = append(t.Requests, r)
	return nil
}

// custom adds a line of VLLMCustom.
func (t *Imported) custom(b []byte) error {
	var l struct {
		Prompt *string  `json:"prompt"`
		Output *float64 `json:"output_tokens"`
	}
	if err := json.Unmarshal(b, &l); err != nil {
		return err
	}
	if l.Prompt == nil {
		return errors.New("prompt is missing")
	}
	output := 0
	if l.Output != nil {
		output = int(*l.Output)
	}
	return t.text(*l.Prompt, output)
}

// text adds a request with a text.
func (t *Imported) text(prompt string, output int) error {
	t.Untimed, t.Texts = true, true
	return t.add(Request{InputLength: textTokens(prompt), OutputLength: output, HashIDs: t.textIDs(prompt)})
}

func textTokens(s string) int { return (len(s) + textBytes - 1) / textBytes }

// textIDs returns an id for every [BlockTokens] assumed tokens of a text. An id covers the text before it too.
func (t *Imported) textIDs(s string) (ids []uint64) {
	hash := uint64(0)
	for part := range slices.Chunk([]byte(s), BlockTokens*textBytes) {
		hash = xxh3.HashSeed(part, hash)
		id, known := t.texts[hash]
		if !known {
			if t.texts == nil {
				t.texts = map[uint64]uint64{}
			}
			id = uint64(len(t.texts))
			t.texts[hash] = id
		}
		ids = append(ids, id)
	}
	return ids
}

// shareGPT reads an array of conversations.
func (t *Imported) shareGPT(r io.Reader, limit int) error {
	d := json.NewDecoder(r)
	if _, err := d.Token(); err != nil {
		return err
	}
	for n := 0; d.More() && (limit == 0 || len(t.Requests) < limit); n++ {
		var c struct {
			Conversations []json.RawMessage `json:"conversations"`
		}
		if err := d.Decode(&c); err != nil {
			return fmt.Errorf("conversation %d: %w: %w", n, ErrFormat, err)
		}
		if len(c.Conversations) < 2 {
			continue // as in vLLM
		}
		prompt, err := turn(c.Conversations[0])
		if err != nil {
			return fmt.Errorf("conversation %d: %w: %w", n, ErrFormat, err)
		}
		answer, err := turn(c.Conversations[1])
		if err != nil {
			return fmt.Errorf("conversation %d: %w: %w", n, ErrFormat, err)
		}
		if err := t.text(prompt, textTokens(answer)); err != nil {
			return err
		}
	}
	return nil
}

// turn returns the text of a turn. Some files have a turn as a string with JSON (kubernetes-sigs/inference-perf #429).
func turn(raw json.RawMessage) (string, error) {
	var inner string
	if json.Unmarshal(raw, &inner) == nil {
		raw = json.RawMessage(inner)
	}
	var x struct {
		Value *string `json:"value"`
	}
	if err := json.Unmarshal(raw, &x); err != nil {
		return "", err
	}
	if x.Value == nil || !utf8.ValidString(*x.Value) {
		return "", errors.New("a turn has no value")
	}
	return *x.Value, nil
}

// azure reads rows of time, prompt tokens and output tokens, with or without a header.
func (t *Imported) azure(r io.Reader, limit int) error {
	rows := csv.NewReader(r)
	rows.FieldsPerRecord, rows.TrimLeadingSpace, rows.ReuseRecord = -1, true, true
	fresh := uint64(0)
	for n := 1; limit == 0 || len(t.Requests) < limit; n++ {
		row, err := rows.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %w", ErrFormat, err)
		}
		if len(row) < 3 {
			return fmt.Errorf("row %d: %w: %d fields, not 3", n, ErrFormat, len(row))
		}
		at, err1 := azureTime(row[0])
		input, err2 := strconv.Atoi(strings.TrimSpace(row[1]))
		output, err3 := strconv.Atoi(strings.TrimSpace(row[2]))
		if err := errors.Join(err1, err2, err3); err != nil {
			if n == 1 {
				continue // the header
			}
			return fmt.Errorf("row %d: %w: %w", n, ErrFormat, err)
		}
		q := Request{Timestamp: at, InputLength: input, OutputLength: output}
		if input >= 0 && input <= 1<<28 {
			for range (input + BlockTokens - 1) / BlockTokens {
				q.HashIDs = append(q.HashIDs, fresh)
				fresh++
			}
		}
		if err := t.add(q); err != nil {
			return fmt.Errorf("row %d: %w: %w", n, ErrFormat, err)
		}
	}
	return nil
}

// azureTime reads a time such as 2023-11-16 18:15:46.6805900, and returns milliseconds since 1970.
func azureTime(text string) (int64, error) {
	text = strings.TrimSuffix(strings.Replace(strings.Trim(strings.TrimSpace(text), `"`), "T", " ", 1), "Z")
	text, _, _ = strings.Cut(text, "+")
	at, err := time.Parse("2006-01-02 15:04:05.999999999", strings.TrimSpace(text))
	return at.UnixMilli(), err
}

// wekaRequest is a request of an agent, or a subagent with requests.
type wekaRequest struct {
	T        float64       `json:"t"`    // seconds
	Type     string        `json:"type"` // "subagent", or another type for a request
	Input    int           `json:"in"`
	Output   int           `json:"out"`
	HashIDs  []uint64      `json:"hash_ids"`
	Requests []wekaRequest `json:"requests"`
}

// weka reads sessions: an array, or objects one after the other.
func (t *Imported) weka(r io.Reader, limit int) error {
	b := bufio.NewReader(r)
	first, err := firstByte(b)
	if err != nil {
		return err
	}
	d := json.NewDecoder(b)
	if first == '[' {
		if _, err := d.Token(); err != nil {
			return err
		}
	}
	t.Tokens = 0
	ids := map[[2]uint64]uint64{} // by session and hash id: ids of different sessions are different prompts
	for n := uint64(0); d.More() && (limit == 0 || len(t.Requests) < limit); n++ {
		var s struct {
			ID        string        `json:"id"`
			BlockSize int           `json:"block_size"`
			Requests  []wekaRequest `json:"requests"`
		}
		if err := d.Decode(&s); err != nil {
			return fmt.Errorf("session %d: %w: %w", n, ErrFormat, err)
		}
		if s.BlockSize < 1 || t.Tokens != 0 && s.BlockSize != t.Tokens {
			return fmt.Errorf("session %d: %w: block_size is %d, and %d before", n, ErrFormat, s.BlockSize, t.Tokens)
		}
		t.Tokens = s.BlockSize
		var all []wekaRequest
		for _, q := range s.Requests {
			if q.Type != "subagent" {
				all = append(all, q)
				continue
			}
			for _, inner := range q.Requests {
				if inner.T+1e-6 < q.T { // relative to the subagent's beginning, as inference-perf decides
					inner.T += q.T
				}
				all = append(all, inner)
			}
		}
		for _, q := range all {
			r := Request{Timestamp: milliseconds(q.T), InputLength: q.Input, OutputLength: q.Output, SessionID: s.ID}
			for _, h := range q.HashIDs {
				id, known := ids[[2]uint64{n, h}]
				if !known {
					id = uint64(len(ids))
					ids[[2]uint64{n, h}] = id
				}
				r.HashIDs = append(r.HashIDs, id)
			}
			if err := t.add(r); err != nil {
				return fmt.Errorf("session %d: %w: %w", n, ErrFormat, err)
			}
		}
	}
	if limit > 0 {
		t.Requests = t.Requests[:min(limit, len(t.Requests))]
	}
	return nil
}

func firstByte(b *bufio.Reader) (byte, error) {
	for {
		c, err := b.ReadByte()
		if err != nil {
			return 0, err
		}
		if c > ' ' {
			return c, b.UnreadByte()
		}
	}
}
