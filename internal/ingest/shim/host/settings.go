package host

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Settings configure a Shim. Most are flags of worker-shim run, with defaults and trade-offs in the help texts.
type Settings struct {
	Namespace string

	// Endpoints of the first rank. Of a source of many ranks, Engine is the place of the source.
	Source, Engine, Replay, Topic string
	Listen                        bool // the engine dials Engine

	Worker, Model          string
	Rank, Ranks, BlockSize uint32
	Spec                   *api.WorkerSpec // facts for routers
	KVGroups, L3Config     string
	L3Master               hicache.Master // of the shared store, if L3Config has none

	EngineHTTP      string
	EngineHTTPToken func() (string, error) // reads the API key
	EngineCheck     time.Duration          // 0: the running engine is not polled
	EngineLoad      time.Duration          // the interval of reads of the engine's load; 0: not read

	QueueBytes                                            int // of a single rank
	ReplayTimeout, IdleCheck, LogRepeat, Lease, ClaimWait time.Duration
	Silence, SilentAfter, GoneAfter, StopWait             time.Duration
	OnUnreadable, OnRefused                               string

	QuietAdvice string // possible causes for a rank that publishes nothing; empty: the usual causes
}

// Values of Settings.OnUnreadable.
const (
	UnreadablePass  = "pass"
	UnreadableClear = "clear"
)

// Limits of a process.
const (
	MaxRanks = 1024

	// LeastQueue is the least of Settings.QueueBytes for ranks in a common process.
	LeastQueue = 4 << 20

	// RetryAfter is the pause between two attempts to serve an unusable engine.
	RetryAfter = 30 * time.Second
)

// CheckNames checks --engine, --worker, --model and --block-size. The flags in optional may be empty.
func (s *Settings) CheckNames(wrong *usage.Complaints, optional ...string) {
	for _, f := range []struct{ name, value string }{{"--engine", s.Engine}, {"--worker", s.Worker},
		{"--model", s.Model}} {
		missing, left := f.value == "", slices.Contains(optional, f.name)
		wrong.When(missing && !left, "%s is missing", f.name)
		if f.name != "--engine" && !(missing && left) {
			_, err := jetstream.EscapeToken(f.value)
			wrong.About(f.name, err)
		}
	}
	wrong.When(s.BlockSize == 0 && !slices.Contains(optional, "--block-size") || s.BlockSize > events.MaxBlockSize,
		"--block-size %d is not from 1 to %d", s.BlockSize, events.MaxBlockSize)
}

// CheckRanks checks that the last of the ranks has a valid number.
func (s *Settings) CheckRanks(wrong *usage.Complaints) {
	last := uint64(s.Rank) + max(uint64(s.Ranks), 1) - 1
	wrong.When(last >= events.MaxRanks, "rank %d (--rank, --ranks) is not from 0 to %d", last, events.MaxRanks-1)
}

// Check checks the settings of an engine, and reads the named files. The error is a usage error.
func (s *Shim) Check() error {
	var wrong usage.Complaints
	var optional []string
	if s.EngineHTTP != "" {
		optional = []string{"--engine", "--worker", "--model", "--block-size"}
	}
	s.CheckNames(&wrong, optional...)
	s.CheckEngine(&wrong)
	wrong = append(wrong, s.checkLearning())
	s.ReadFacts(&wrong)
	return wrong.Usage()
}

// CheckEngine checks the source, the endpoints and the ranks of an engine.
func (s *Shim) CheckEngine(wrong *usage.Complaints) {
	_, err := events.EngineOf(s.Source)
	wrong.When(err != nil, "--source %q is none of auto, vllm, sglang, ndjson, dynamo-nats, dynamo-zmq, mooncake",
		s.Source)
	for _, f := range []struct{ name, value string }{{"--engine", s.Engine}, {"--replay", s.Replay}} {
		if f.value != "" {
			wrong.About(f.name, zmtp.CheckEndpoint(f.value))
		}
	}
	s.CheckRanks(wrong)
	if len(*wrong) == 0 && s.Engine != "" {
		*wrong = append(*wrong, s.checkPorts())
	}
}

// ReadFacts reads the registered facts of a worker beside the name: the shared store, the KV-cache groups and the facts
// for routers.
func (s *Shim) ReadFacts(wrong *usage.Complaints) {
	if s.L3Config != "" {
		wrong.About("--l3-config", s.readL3Config())
	}
	*wrong = append(*wrong, s.readGroups(), s.readSpec())
}

// checkLearning checks the settings of an engine with further settings over HTTP.
func (s *Shim) checkLearning() error {
	if s.EngineHTTP == "" {
		return nil
	}
	if _, err := s.asker(); err != nil {
		return err
	}
	if s.Engine == "" && (s.Replay != "" || s.Rank != 0 || s.Ranks != 1) {
		return errors.New(
			"--replay, --rank and --ranks go with --engine: without --engine, the settings come from --engine-http")
	}
	return nil
}

// readL3Config reads the registered configuration of a shared store.
func (s *Shim) readL3Config() error {
	data, err := os.ReadFile(s.L3Config)
	if err != nil {
		return err
	}
	c, passed, err := hicache.DecodeConfig(data)
	if err == nil {
		c = c.WithMaster(s.L3Master)
		if whole := c; c.Open() { // the groups are still unknown, and the rest is checked now
			whole = c.WithGroups([]hicache.Group{{Kind: hicache.Full}}, cmp.Or(s.BlockSize, 16))
			err = whole.Check()
		} else {
			err = c.Check()
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", s.L3Config, err)
	}
	s.l3, s.l3Passed = &c, passed
	return nil
}

// readGroups reads the KV-cache groups that the engine's events omit.
func (s *Shim) readGroups() (err error) {
	switch {
	case s.KVGroups == "" && s.l3 != nil && !s.l3.Open():
		s.groups = s.l3.GroupSpecs(s.BlockSize)
	case s.KVGroups != "":
		if s.groups, err = events.ParseGroups(s.KVGroups); err != nil {
			return fmt.Errorf("--kv-groups: %w", err)
		}
	}
	return nil
}

// readSpec reads the facts for routers. Without --serving-endpoint, the worker accepts requests at the address of
// --engine-http; serveElsewhere replaces a loopback address.
func (s *Shim) readSpec() error {
	if s.spec != nil {
		return nil // the ranks of an engine share the facts
	}
	spec := *s.Spec
	s.spec = &spec
	if spec.Endpoint == "" && s.EngineHTTP != "" {
		asker, err := s.asker()
		if err != nil {
			return nil // checkLearning reports the error
		}
		if s.loopbackEngine = isLoopback(asker.Host()); !s.loopbackEngine {
			s.spec.Endpoint = servingAt(s.EngineHTTP, asker.Host(), asker.Port())
		}
	}
	return nil
}
