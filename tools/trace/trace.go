package trace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math"
	"math/bits"
	"os"
	"strconv"
)

const (
	// BlockTokens is the number of prompt tokens of a hash id.
	BlockTokens = 512

	// MaxLine is the maximum length of a line of a trace file, in bytes. A prompt of a million tokens needs about 16 kB.
	MaxLine = 1 << 20
)

// Request is a request of a trace.
type Request struct {
	Timestamp    int64 // ms since the trace's beginning
	InputLength  int   // tokens of the prompt
	OutputLength int   // tokens of the answer
	HashIDs      []uint64
	SessionID    string // of the conversation; "" if absent
}

// line is a request in the form of a file. Required fields are pointers.
type line struct {
	Timestamp    moment    `json:"timestamp"`
	InputLength  *int      `json:"input_length"`
	OutputLength *int      `json:"output_length"`
	HashIDs      *[]uint64 `json:"hash_ids"`
	SessionID    string    `json:"session_id,omitempty"`
}

// moment is a time in ms. A fraction in a file is rounded.
type moment int64

// UnmarshalJSON reads a number.
func (m *moment) UnmarshalJSON(b []byte) error {
	if n, err := strconv.ParseInt(string(b), 10, 64); err == nil {
		*m = moment(n)
		return nil
	}
	var x float64
	if err := json.Unmarshal(b, &x); err != nil {
		return err
	}
	if math.Abs(x) > 1<<62 {
		return fmt.Errorf("timestamp %v is out of range", x)
	}
	*m = moment(math.Round(x))
	return nil
}

// ErrFormat reports a file with invalid content.
var ErrFormat = errors.New("no request")

// Requests iterates over the requests of a trace. It ends after the first error. The error has the line, and wraps
// [ErrFormat] for invalid content. Empty lines are skipped.
func Requests(r io.Reader) iter.Seq2[Request, error] {
	return func(yield func(Request, error) bool) {
		lines := bufio.NewScanner(r)
		lines.Buffer(make([]byte, 64<<10), MaxLine)
		n := 0
		for lines.Scan() {
			n++
			if blank(lines.Bytes()) {
				continue
			}
			req, err := parse(lines.Bytes())
			if err != nil {
				yield(Request{}, fmt.Errorf("line %d: %w: %w", n, ErrFormat, err))
				return
			}
			if !yield(req, nil) {
				return
			}
		}
		if err := lines.Err(); errors.Is(err, bufio.ErrTooLong) {
			yield(Request{}, fmt.Errorf("line %d: %w: longer than %d bytes", n+1, ErrFormat, MaxLine))
		} else if err != nil {
			yield(Request{}, fmt.Errorf("line %d: %w", n+1, err))
		}
	}
}

func blank(b []byte) bool {
	for _, c := range b {
		if c != ' ' && c != '\t' && c != '\r' {
			return false
		}
	}
	return true
}

func parse(b []byte) (Request, error) {
	var l line
	if err := json.Unmarshal(b, &l); err != nil {
		return Request{}, err
	}
	switch {
	case l.InputLength == nil:
		return Request{}, errors.New("no input_length")
	case l.OutputLength == nil:
		return Request{}, errors.New("no output_length")
	case l.HashIDs == nil:
		return Request{}, errors.New("no hash_ids")
	case *l.InputLength < 0:
		return Request{}, fmt.Errorf("input_length %d is negative", *l.InputLength)
	case *l.OutputLength < 0:
		return Request{}, fmt.Errorf("output_length %d is negative", *l.OutputLength)
	}
	return Request{int64(l.Timestamp), *l.InputLength, *l.OutputLength, *l.HashIDs, l.SessionID}, nil
}

// Read reads the first limit requests of a trace, or all if limit is 0. An error names the line.
func Read(r io.Reader, limit int) ([]Request, error) {
	var reqs []Request
	for req, err := range Requests(r) {
		if err != nil {
			return nil, err
		}
		if reqs = append(reqs, req); len(reqs) == limit {
			break
		}
	}
	return reqs, nil
}

// ReadFile is [Read] of a file. An error names the file and the line.
func ReadFile(path string, limit int) ([]Request, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read trace: %w", err)
	}
	defer f.Close()
	reqs, err := Read(f, limit)
	if err != nil {
		return nil, fmt.Errorf("read trace: %s: %w", path, err)
	}
	return reqs, nil
}

// Write writes a trace in the format of [Read].
func Write(w io.Writer, reqs []Request) error {
	b := bufio.NewWriter(w)
	for i := range reqs {
		r := &reqs[i]
		ids := r.HashIDs
		if ids == nil {
			ids = []uint64{}
		}
		text, err := json.Marshal(line{moment(r.Timestamp), &r.InputLength, &r.OutputLength, &ids, r.SessionID})
		if err != nil {
			return fmt.Errorf("write trace: request %d: %w", i, err)
		}
		b.Write(text)
		b.WriteByte('\n')
	}
	if err := b.Flush(); err != nil {
		return fmt.Errorf("write trace: %w", err)
	}
	return nil
}

// Tokens of answers have the bit answerBit, tokens of prompts do not. No token has the sign bit of an int32, because
// some engines' clients fail with negative tokens.
const (
	answerBit = 1 << 30
	tokenMask = answerBit - 1
)

// CheckBlockSize complains if a block size, in tokens, does not divide [BlockTokens].
func CheckBlockSize(blockSize int) error {
	if blockSize <= 0 || BlockTokens%blockSize != 0 {
		return fmt.Errorf("block size %d does not divide %d", blockSize, BlockTokens)
	}
	return nil
}

// PromptTokens appends the prompt's tokens to dst. An id h is split into f = 512/blockSize blocks of blockSize tokens,
// and all tokens of block i are h·f+i. So two prompts have equal tokens as far as their ids are equal (ids from 2³⁰/f
// on wrap round). The number of tokens is InputLength, or fewer with too few ids. PromptTokens panics if the block size
// fails [CheckBlockSize].
func (r Request) PromptTokens(dst []uint32, blockSize int) []uint32 {
	if err := CheckBlockSize(blockSize); err != nil {
		panic("trace: " + err.Error())
	}
	per := uint64(BlockTokens / blockSize)
	left := r.InputLength
	for _, h := range r.HashIDs {
		for i := uint64(0); i < per && left > 0; i++ {
			for n := min(blockSize, left); n > 0; n-- {
				dst = append(dst, uint32((h*per+i)&tokenMask))
				left--
			}
		}
	}
	return dst
}

// OutputTokens appends the answer's OutputLength tokens to dst. The tokens depend on the request's number in the trace
// and differ from all other answers and prompts.
func (r Request) OutputTokens(dst []uint32, number int) []uint32 {
	for i := range r.OutputLength {
		dst = append(dst, answerBit|uint32(scramble(uint64(number)<<32^uint64(i))&tokenMask))
	}
	return dst
}

// scramble is SplitMix64's step for a state of x.
func scramble(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

// below maps 64 random bits to 0…n-1.
func below(random, n uint64) uint64 {
	hi, _ := bits.Mul64(random, n)
	return hi
}
