package enginesim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// ErrDown is returned by an engine that has crashed or was stopped.
var ErrDown = errors.New("enginesim: engine is down")

// Config describes an engine. Zero fields take their defaults.
type Config struct {
	// Endpoint and Replay are where the publisher and the replay socket listen; default tcp://127.0.0.1:0, a free port.
	Endpoint string
	Replay   string

	// Dial makes the publisher dial a subscriber that listens at Endpoint.
	Dial bool

	// NoReplay leaves out the replay socket.
	NoReplay bool

	Release Release     // how it speaks; default VLLM026
	Topic   string      // of every message; default empty
	Rank    events.Rank // data-parallel rank

	BlockSize int // tokens; default 16
	Capacity  int // blocks; default 1,000

	// Buffer is how many messages are kept for replay; default 10,000.
	Buffer int

	// HighWater is how many messages wait for one subscriber before they are dropped; default 100,000. ReplayHighWater
	// is the same of replies; a libzmq router has 1,000, but the default here is 100,000, with which a whole replay
	// arrives.
	HighWater       int
	ReplayHighWater int

	// FirstSeq is the first sequence of each life; real engines begin with 0, some simulators with 1.
	FirstSeq events.EngineSeq

	// PerEvent makes each event a message of its own.
	PerEvent bool

	// Seed decides how the engine names blocks. With SeedPerLife each life draws another, as a Python process does
	// whose hash seed is not fixed.
	Seed        uint64
	SeedPerLife bool

	// Announced, if set, is told every event. It must not call the engine.
	Announced func(Announced)
}

// Announced is one event as the engine means it. Its slices are valid during the call only.
type Announced struct {
	Life int              // of the engine, from 1
	Seq  events.EngineSeq // of the message that carries it

	Kind      events.Kind
	HasParent bool
	Parent    events.BlockHash   // of a stored event with HasParent
	Blocks    []events.BlockHash // stored, removed
	Tokens    []uint32           // stored: of all Blocks together
}

// Engine is a simulated engine.
type Engine struct {
	cfg Config
	ctx context.Context

	mu     sync.Mutex // held through each method; Announced is called under it
	life   int
	pub    *zmtpserver.Pub // nil while down
	router *zmtpserver.Router
	seed   uint64
	cache  *Cache
	seq    events.EngineSeq
	kept   []kept
	drops  []bool // for each of the next messages: whether what is not sent is kept
	gone   []events.BlockHash
	names  []events.BlockHash

	replays sync.WaitGroup // the goroutine that answers requests
}

type kept struct {
	seq     events.EngineSeq
	payload []byte
}

// Start opens the sockets. The engine lives until ctx ends or Stop is called.
func Start(ctx context.Context, cfg Config) (*Engine, error) {
	def := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	def(&cfg.BlockSize, 16)
	def(&cfg.Capacity, 1000)
	def(&cfg.Buffer, 10_000)
	def(&cfg.HighWater, 100_000)
	def(&cfg.ReplayHighWater, 100_000)
	if cfg.Endpoint == "" {
		cfg.Endpoint = "tcp://127.0.0.1:0"
	}
	if cfg.Replay == "" {
		cfg.Replay = "tcp://127.0.0.1:0"
	}
	if cfg.BlockSize < 1 || cfg.Capacity < 1 || cfg.Buffer < 1 {
		return nil, fmt.Errorf("enginesim: block size %d, capacity %d and buffer %d must be positive", cfg.BlockSize,
			cfg.Capacity, cfg.Buffer)
	}
	e := &Engine{cfg: cfg, ctx: ctx}
	if err := e.up(); err != nil {
		return nil, err
	}
	return e, nil
}

// up begins a life. The caller holds mu, or is alone.
func (e *Engine) up() error {
	open := zmtpserver.ListenPub
	if e.cfg.Dial {
		open = zmtpserver.DialPub
	}
	pub, err := open(e.ctx, e.cfg.Endpoint, zmtp.Config{SendQueue: e.cfg.HighWater, Heartbeat: -1})
	if err != nil {
		return err
	}
	if !e.cfg.NoReplay {
		router, err := zmtpserver.ListenRouter(e.ctx, e.cfg.Replay, zmtp.Config{SendQueue: e.cfg.ReplayHighWater,
			Heartbeat: -1})
		if err != nil {
			pub.Stop()
			return err
		}
		e.router = router
		e.cfg.Replay = router.Addr()
		e.replays.Go(func() { e.answer(router) })
	}
	e.pub = pub
	e.cfg.Endpoint = pub.Addr() // the next life is found where this one was
	e.life++
	e.seed = e.cfg.Seed
	if e.cfg.SeedPerLife {
		e.seed = rand.Uint64()
	}
	e.cache = NewCache(e.cfg.Capacity)
	e.seq, e.kept, e.drops = e.cfg.FirstSeq, nil, nil
	return nil
}

// Endpoint is where a reader dials the publisher.
func (e *Engine) Endpoint() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cfg.Endpoint
}

// Replay is where a reader asks for what it missed; empty with NoReplay.
func (e *Engine) Replay() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cfg.NoReplay {
		return ""
	}
	return e.cfg.Replay
}

// Serve runs one request: a prompt, and the tokens that the model answers. It returns how many of the prompt's blocks
// were held.
func (e *Engine) Serve(prompt, output []uint32) (hit int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return 0, ErrDown
	}
	tokens := append(prompt[:len(prompt):len(prompt)], output...)
	size := e.cfg.BlockSize
	e.names = AppendNames(e.names[:0], e.seed, size, tokens)
	inPrompt := len(prompt) / size
	held := e.cache.Hit(e.names)

	var step []Announced
	store := func(from, to int) {
		a := Announced{Kind: events.Stored, Blocks: e.names[from:to:to], Tokens: tokens[from*size : to*size : to*size]}
		if from > 0 {
			a.HasParent, a.Parent = true, e.names[from-1]
		}
		step = append(step, a)
	}
	if held < inPrompt {
		store(held, inPrompt)
	}
	for i := max(held, inPrompt); i < len(e.names); i++ {
		store(i, i+1)
	}
	e.gone = e.cache.Use(e.names, e.gone[:0])
	for i := range e.gone {
		step = append(step, Announced{Kind: events.Removed, Blocks: e.gone[i : i+1 : i+1]})
	}
	return min(held, inPrompt), e.announce(step)
}

// Clear empties the cache and says so.
func (e *Engine) Clear() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return ErrDown
	}
	e.cache.Clear()
	return e.announce([]Announced{{Kind: events.Cleared}})
}

func (e *Engine) announce(step []Announced) error {
	if !e.cfg.PerEvent {
		return e.publish(step)
	}
	for i := range step {
		if err := e.publish(step[i : i+1]); err != nil {
			return err
		}
	}
	return nil
}

// publish makes one message of a batch.
func (e *Engine) publish(batch []Announced) error {
	if len(batch) == 0 {
		return nil
	}
	seq := e.seq
	e.seq++
	for i := range batch {
		batch[i].Life, batch[i].Seq = e.life, seq
		if e.cfg.Announced != nil {
			e.cfg.Announced(batch[i])
		}
	}
	return e.send(seq, e.cfg.Release.appendBatch(nil, float64(time.Now().UnixMicro())/1e6, batch, e.cfg.BlockSize,
		e.cfg.Rank))
}

// Garble publishes a message of which nobody can read what it says.
func (e *Engine) Garble() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return ErrDown
	}
	seq := e.seq
	e.seq++
	return e.send(seq, []byte{0xc1}) // which stands for nothing in MessagePack
}

// send sends a message, and keeps it for replay, unless it is to be dropped.
func (e *Engine) send(seq events.EngineSeq, payload []byte) error {
	send, keep := true, true
	if len(e.drops) > 0 {
		send, keep, e.drops = false, e.drops[0], e.drops[1:]
	}
	if keep {
		if len(e.kept) == e.cfg.Buffer {
			e.kept[0] = kept{}
			e.kept = e.kept[1:]
		}
		e.kept = append(e.kept, kept{seq, payload})
	}
	if !send {
		return nil
	}
	return e.pub.Send([]byte(e.cfg.Topic), binary.BigEndian.AppendUint64(nil, uint64(seq)), payload)
}

// Drop makes the next n messages a gap: they are not sent, and can be had by replay only if keep is true.
func (e *Engine) Drop(n int, keep bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for range n {
		e.drops = append(e.drops, keep)
	}
}

// Crash ends this life: what was queued is lost, connections break, nothing is announced. Crashing twice is harmless.
func (e *Engine) Crash() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.crash()
}

func (e *Engine) crash() {
	if e.pub == nil {
		return
	}
	e.pub.Stop()
	e.pub = nil
	if e.router != nil {
		e.router.Stop()
		e.router = nil
	}
}

// Restart begins a new life at the same endpoints, after a crash if there was none.
func (e *Engine) Restart() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.crash()
	return e.up()
}

// Stop ends the engine for good. It may be called twice.
func (e *Engine) Stop() {
	e.Crash()
	e.replays.Wait()
}

// State is what an engine holds and has counted.
type State struct {
	Life    int
	NextSeq events.EngineSeq
	Blocks  []events.BlockHash // held, the least recently used first
	Dropped uint64             // messages that a slow subscriber did not get in this life
}

// State tells what the engine holds.
func (e *Engine) State() State {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := State{Life: e.life, NextSeq: e.seq}
	if e.pub == nil {
		return s
	}
	for b := range e.cache.All() {
		s.Blocks = append(s.Blocks, b)
	}
	s.Dropped = e.pub.Stats().Dropped
	return s
}

// Hit is how many of the prompt's blocks are held. It changes nothing.
func (e *Engine) Hit(prompt []uint32) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return 0
	}
	e.names = AppendNames(e.names[:0], e.seed, e.cfg.BlockSize, prompt)
	return e.cache.Hit(e.names)
}

// WaitSubscribers waits until n readers have subscribed in this life.
func (e *Engine) WaitSubscribers(ctx context.Context, n int) error {
	e.mu.Lock()
	pub := e.pub
	e.mu.Unlock()
	if pub == nil {
		return ErrDown
	}
	return pub.WaitSubscribers(ctx, n)
}

// endOfReplay is the sequence that ends a replay: -1.
var endOfReplay = []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// answer serves requests for replay as vLLM does: a request that is not ["", u64 BE] gets nothing, and one for what is
// no longer kept gets what is left. Replies beyond the high-water mark are dropped.
func (e *Engine) answer(router *zmtpserver.Router) {
	for {
		from, req, err := router.Recv(context.Background())
		if err != nil {
			return // stopped
		}
		if len(req) != 2 || len(req[0]) != 0 || len(req[1]) != 8 {
			continue
		}
		first := events.EngineSeq(binary.BigEndian.Uint64(req[1]))
		for _, k := range e.keptFrom(router, first) {
			e.reply(router, from, e.cfg.Topic, binary.BigEndian.AppendUint64(nil, uint64(k.seq)), k.payload)
		}
		e.reply(router, from, "", endOfReplay, nil)
	}
}

// keptFrom is what can be replayed, if the life that router belongs to still lasts.
func (e *Engine) keptFrom(router *zmtpserver.Router, first events.EngineSeq) []kept {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.router != router {
		return nil
	}
	for i, k := range e.kept {
		if k.seq >= first {
			return append([]kept(nil), e.kept[i:]...)
		}
	}
	return nil
}

func (e *Engine) reply(router *zmtpserver.Router, to, topic string, seq, payload []byte) {
	// A reply that cannot be delivered is lost, as with a real engine; the reader finds the hole.
	if e.cfg.Release.replayHasTopic() {
		_ = router.Send(to, nil, []byte(topic), seq, payload)
		return
	}
	_ = router.Send(to, nil, seq, payload)
}
