package whatif

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/operate/recording"
)

// Limits bound the memory of an Input.
type Limits struct {
	Requests int // latest requests to keep
	Blocks   int // blocks of the prompts of these requests
}

// DefaultLimits returns the usual limits. A request of 4,500 tokens in blocks of 16 needs about 20 kB.
func DefaultLimits() Limits { return Limits{Requests: 100_000, Blocks: 32 << 20} }

// Bounds of a recorded request. Larger values are invalid.
const (
	maxTokens    = 1 << 24
	maxBlockSize = 1 << 16
	maxLine      = 16 << 20 // bytes of a line of a file
	maxMillis    = 1 << 53
)

// request is a recorded request that a worker has computed.
type request struct {
	at        int64 // of the arrival, milliseconds since 1970
	blockSize int
	span      int      // tokens of a name
	names     []uint64 // of the prompt
	tokens    int
	session   uint64

	output  int  // tokens of the answer; 0: unknown
	guessed bool // output is an estimate, because the recording has none
	first   int  // milliseconds from the booking to the first token; 0: unknown
	life    int  // milliseconds from the booking to the end; 0: unknown

	worker   string // with the rank
	policy   string
	depth    int  // blocks of the prompt on the worker before the choice, in all tiers
	idle     bool // the worker had no other booked request
	cached   int  // reused tokens: reported by the engine, or estimated
	reported bool
}

// Counts are the requests that were read, and the reasons for the skipped requests.
type Counts struct {
	Read          int `json:"read"`          // of the model
	Replayed      int `json:"replayed"`      // in all replays
	Older         int `json:"older"`         // beyond the limits: only the latest requests are replayed
	Refused       int `json:"refused"`       // no worker was chosen
	Disaggregated int `json:"disaggregated"` // with a separate prefill worker
	OtherBlocks   int `json:"other_blocks"`  // in another block size than the latest request
	TooLong       int `json:"too_long"`      // larger than the memory of a worker

	// Of the replayed requests:
	Pinned        int `json:"pinned"`           // named their worker; the replays with choices choose freely
	Unreported    int `json:"unreported"`       // without a report of the engine: the reuse is the estimate of the index
	NoLatency     int `json:"no_latency"`       // without the time to the first token
	NoOutput      int `json:"no_output"`        // without the length of the answer
	NoSession     int `json:"no_session"`       // without a session_id
	EngineHashes  int `json:"engine_hashes"`    // by engine hashes: common prefixes with other requests are unknown
	Incomplete    int `json:"incomplete"`       // chosen without the blocks of some partitions
	DroppedByNode int `json:"dropped"`          // records that nodes have dropped
	Unreadable    int `json:"unreadable"`       // damaged batches or lines
	LongestPause  int `json:"longest_pause_ms"` // between two requests
}

// Input collects recorded requests of a model, in order of arrival. Its methods are not safe for concurrent use.
type Input struct {
	Counts

	limits   Limits
	model    string // empty: the first request's
	models   map[string]bool
	list     []*request
	flags    []recording.Flags // of list
	engine   []bool            // of list: by engine hashes
	blocks   int
	sessions map[string]uint64
}

// NewInput returns an empty Input. An empty model requires that all requests have the same model.
func NewInput(limits Limits, model string) *Input {
	return &Input{limits: limits, model: model, models: map[string]bool{}, sessions: map[string]uint64{}}
}

// Model returns the model of the requests.
func (in *Input) Model() string { return in.model }

// Add adds a request of the stream. It is a visitor for [recording.Read].
func (in *Input) Add(q *recording.Joined) error {
	r := &q.Request
	x := &request{at: r.Time, blockSize: int(r.BlockSize), span: int(r.Span), tokens: int(min(r.Tokens, maxTokens+1)),
		session: uint64(r.Session), policy: r.Policy, worker: workerName(r.Place.Worker, r.Place.Rank),
		depth: int(r.Place.Device + r.Place.Host + r.Place.Disk + r.Place.Shared), idle: r.Place.Requests == 0,
		cached: int(min(r.Cached, r.Tokens))}
	for _, n := range r.Names {
		x.names = append(x.names, uint64(n))
	}
	if q.Flags&recording.Ended != 0 {
		x.first, x.life = int(min(q.FirstToken, maxMillis)), int(min(q.Life, maxMillis))
		x.output = int(min(q.End.Blocks*uint64(r.BlockSize), maxTokens))
	}
	if x.output == 0 {
		x.output = int(min(r.Output, maxTokens))
	}
	if q.Flags&recording.Reported != 0 {
		x.cached, x.reported = int(min(q.Report.Cached, r.Tokens)), true
	}
	return in.add(x, r.Model, q.Flags, r.EngineHashes)
}

// workerName is the name of a rank in a replay.
func workerName(worker string, rank uint32) string {
	if rank == 0 {
		return worker
	}
	return worker + " rank " + strconv.Itoa(int(rank))
}

// errNotExported reports a line of another format.
var errNotExported = errors.New("no request of indexer record export --format json")

// BlockSize returns the block size of the latest request; 1 without requests.
func (in *Input) BlockSize() int {
	if len(in.list) == 0 {
		return 1
	}
	return in.list[len(in.list)-1].blockSize
}

// ReadFile adds the selected requests of a file in the format JSON of indexer record export. An error names the line.
func (in *Input) ReadFile(r io.Reader, f recording.Filter) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	n := 0
	for lines.Scan() {
		n++
		if len(strings.TrimSpace(lines.Text())) == 0 {
			continue
		}
		if err := in.addLine(lines.Bytes(), f); err != nil {
			return fmt.Errorf("line %d: %w", n, err)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("line %d: %w", n+1, err)
	}
	return nil
}

func (in *Input) addLine(text []byte, f recording.Filter) error {
	var l recording.Line
	if err := json.Unmarshal(text, &l); err != nil {
		return fmt.Errorf("%w: %w", errNotExported, err)
	}
	if l.Time.Before(f.Since) || !f.Until.IsZero() && !l.Time.Before(f.Until) {
		return nil
	}
	if l.Model == "" || l.BlockSize == 0 || l.HashTokens == 0 {
		return fmt.Errorf("%w: a field of model, block_size and hash_tokens is missing", errNotExported)
	}
	if l.InputLength > maxTokens || l.OutputLength > maxTokens || l.FirstTokenMS > maxMillis || l.LifeMS > maxMillis {
		return errors.New("a length or a time is too large")
	}
	for i := range l.HashIDs {
		l.HashIDs[i]++ // 0 is no name
	}
	x := &request{at: l.Time.UnixMilli(), blockSize: int(l.BlockSize), span: int(l.HashTokens), names: l.HashIDs,
		tokens: int(l.InputLength), output: int(l.OutputLength), first: int(l.FirstTokenMS), life: int(l.LifeMS),
		policy: l.Policy, cached: int(min(l.CachedTokens, l.InputLength))}
	if l.SessionID != "" {
		if in.sessions[l.SessionID] == 0 {
			in.sessions[l.SessionID] = uint64(len(in.sessions)) + 1
		}
		x.session = in.sessions[l.SessionID]
	}
	if l.ReportedTokens != nil {
		x.cached, x.reported = int(min(*l.ReportedTokens, l.InputLength)), true
	}
	var flags recording.Flags
	set := func(on bool, f recording.Flags) {
		if on {
			flags |= f
		}
	}
	set(l.Refused || l.Choice == nil, recording.Refused)
	set(l.Incomplete, recording.Incomplete)
	set(l.Restricted, recording.Pinned)
	set(l.Prefill != nil, recording.Disaggregated)
	if c := l.Choice; c != nil {
		x.worker, x.idle = workerName(c.Worker, c.Rank), c.Requests == 0
		x.depth = int(c.Device) + int(c.Host) + int(c.Disk) + int(c.Shared)
	}
	return in.add(x, l.Model, flags, l.EngineHashes)
}

func (in *Input) add(x *request, model string, flags recording.Flags, engineHashes bool) error {
	if in.models[model] = true; len(in.models) > 1000 {
		return errors.New("the recording has over 1,000 models")
	}
	if in.model == "" {
		in.model = model
	}
	if model != in.model {
		return nil
	}
	if x.blockSize < 1 || x.blockSize > maxBlockSize || x.span < x.blockSize || x.span%x.blockSize != 0 ||
		x.tokens > maxTokens {
		return fmt.Errorf("a request has %d tokens in blocks of %d and spans of %d", x.tokens, x.blockSize, x.span)
	}
	if n := len(in.list); n > 0 && x.at < in.list[n-1].at {
		return errors.New("a request is earlier than the request before")
	}
	in.Read++
	switch {
	case flags&recording.Refused != 0:
		in.Refused++
		return nil
	case flags&recording.Disaggregated != 0:
		in.Disaggregated++
		return nil
	}
	x.names = x.names[:min(len(x.names), (x.tokens+x.span-1)/x.span)]
	in.list, in.flags, in.engine = append(in.list, x), append(in.flags, flags), append(in.engine, engineHashes)
	in.blocks += x.tokens / x.blockSize
	for len(in.list) > in.limits.Requests || in.blocks > in.limits.Blocks && len(in.list) > 1 {
		in.blocks -= in.list[0].tokens / in.list[0].blockSize
		in.list[0] = nil // append copies the rest now and then
		in.list, in.flags, in.engine = in.list[1:], in.flags[1:], in.engine[1:]
		in.Older++
	}
	return nil
}

// Least numbers of requests for an analysis.
const (
	leastRequests = 100
	leastLatency  = 50
)

// requests returns the requests to replay, and completes the counts. fits reports whether a request fits into a worker.
func (in *Input) requests(fits func(*request) bool) (list []*request, err error) {
	if len(in.models) > 1 && in.Read == 0 {
		return nil, fmt.Errorf("the recording has no request of model %q", in.model)
	}
	c := &in.Counts
	*c = Counts{Read: c.Read, Older: c.Older, Refused: c.Refused, Disaggregated: c.Disaggregated,
		DroppedByNode: c.DroppedByNode, Unreadable: c.Unreadable}
	for i, x := range in.list {
		switch {
		case x.blockSize != in.list[len(in.list)-1].blockSize:
			in.OtherBlocks++
			continue
		case !fits(x):
			in.TooLong++
			continue
		}
		if n := len(list); n > 0 {
			in.LongestPause = max(in.LongestPause, int(x.at-list[n-1].at))
		}
		list = append(list, x)
		count := func(on bool, n *int) {
			if on {
				*n++
			}
		}
		count(in.flags[i]&recording.Pinned != 0, &in.Pinned)
		count(in.flags[i]&recording.Incomplete != 0, &in.Incomplete)
		count(in.engine[i], &in.EngineHashes)
		count(!x.reported, &in.Unreported)
		count(x.first == 0, &in.NoLatency)
		count(x.session == 0, &in.NoSession)
		count(x.guessed, &in.NoOutput)
	}
	in.Replayed = len(list)
	if in.Disaggregated > in.Replayed {
		return nil, fmt.Errorf("%d of %d requests have a separate prefill worker, and the simulator has none",
			in.Disaggregated, in.Read)
	}
	if in.Replayed < leastRequests {
		return nil, fmt.Errorf("%d requests of model %q are too few for an analysis: at least %d must be recorded and "+
			"routed; take an earlier --since, or record for longer", in.Replayed, in.model, leastRequests)
	}
	if in.TooLong*100 > in.Replayed {
		return nil, fmt.Errorf("%d requests do not fit into the memory of a worker with the changes; %d fit", in.TooLong,
			in.Replayed)
	}
	return list, nil
}

// severalModels returns an error if the recording has several models and none was selected.
func (in *Input) severalModels(selected bool) error {
	if selected || len(in.models) < 2 {
		return nil
	}
	var names []string
	for m := range in.models {
		names = append(names, m)
	}
	return fmt.Errorf("the recording has the models %s: select one with --model", joined(names))
}
