package enginesim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// ErrDown is returned by an engine after Crash or Stop.
var ErrDown = errors.New("enginesim: engine is down")

// Config configures an engine. Zero fields have default values.
type Config struct {
	// Endpoint and Replay are where the publisher and the replay socket listen; default tcp://127.0.0.1:0, a free port.
	Endpoint string
	Replay   string

	// Dial makes the publisher connect to a subscriber that listens at Endpoint.
	Dial bool

	// NoReplay leaves out the replay socket.
	NoReplay bool

	Release Release     // the wire protocol; default VLLM026
	Topic   string      // of every message; default empty
	Rank    events.Rank // data-parallel rank

	BlockSize int // tokens; default 16
	Capacity  int // blocks; default 1,000
	Host      int // blocks of host memory, which receives evicted blocks; default none

	// Buffer is how many messages are kept for replay; default 10,000.
	Buffer int

	// HighWater is the maximum number of waiting messages for a subscriber; later messages are dropped. The default is
	// 100,000. ReplayHighWater is the limit for replies. A libzmq router has 1,000. The default here is 100,000, enough
	// for a whole replay.
	HighWater       int
	ReplayHighWater int

	// FirstSeq is the first sequence of a life. Real engines begin with 0, some simulators with 1.
	FirstSeq events.EngineSeq

	// PerEvent sends every event in a separate message.
	PerEvent bool

	// Seed determines the names of blocks. With SeedPerLife every life draws a random seed, as a Python process without a
	// fixed hash seed does.
	Seed        uint64
	SeedPerLife bool

	// Announced is called with every event. It must not call the engine. nil disables the call.
	Announced func(Announced)
}

// Announced is an event of the engine. The slices are valid only during the call.
type Announced struct {
	Life int              // of the engine, from 1
	Seq  events.EngineSeq // of the message with the event

	Kind      events.Kind
	Tier      events.Tier // stored, removed: Device or Host
	HasParent bool
	Parent    events.BlockHash   // of a stored event with HasParent
	Blocks    []events.BlockHash // stored, removed
	Tokens    []uint32           // stored on the device: of all Blocks together
	Session   string             // stored: of the request; only releases with maps announce it
}

// Engine is a simulated engine.
type Engine struct {
	cfg Config
	ctx context.Context

	mu     sync.Mutex // held during all methods, including the call of Announced
	life   int
	pub    *zmtpserver.Pub // nil while down
	router *zmtpserver.Router
	seed   uint64
	cache  *Cache
	host   *Cache // nil: no host memory
	seq    events.EngineSeq
	kept   []kept
	drops  []bool             // an element for every dropped message: whether the message is kept for replay
	gone   []events.BlockHash // these three are scratch
	lost   []events.BlockHash // from host memory
	names  []events.BlockHash

	replays sync.WaitGroup // the goroutine for replay requests
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
	if cfg.Host < 0 {
		return nil, fmt.Errorf("enginesim: host memory of %d blocks is negative", cfg.Host)
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
	e.cfg.Endpoint = pub.Addr() // the next life has the same endpoint
	e.life++
	e.seed = e.cfg.Seed
	if e.cfg.SeedPerLife {
		e.seed = rand.Uint64()
	}
	e.cache, e.host = NewCache(e.cfg.Capacity), nil
	if e.cfg.Host > 0 {
		e.host = NewCache(e.cfg.Host)
	}
	e.seq, e.kept, e.drops = e.cfg.FirstSeq, nil, nil
	return nil
}

// Endpoint is where a reader dials the publisher.
func (e *Engine) Endpoint() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.cfg.Endpoint
}

// Replay returns the endpoint for replay requests; empty with NoReplay.
func (e *Engine) Replay() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.cfg.NoReplay {
		return ""
	}
	return e.cfg.Replay
}

// Serve runs a request: a prompt, and the output tokens of the model. It returns the number of the prompt's cached
// blocks.
func (e *Engine) Serve(prompt, output []uint32) (hit int, err error) {
	return e.ServeSession("", prompt, output)
}

// ServeSession is Serve for a request with a session id. Events of newly stored blocks have the id, as in vLLM from
// 0.30 on.
func (e *Engine) ServeSession(session string, prompt, output []uint32) (hit int, err error) {
	hit, _, err = e.ServeTiers(session, prompt, output)
	return hit, err
}

// ServeTiers is ServeSession for an engine with host memory. It also returns the number of the prompt's blocks that
// follow in host memory. The engine copies these blocks to the device.
func (e *Engine) ServeTiers(session string, prompt, output []uint32) (device, host int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return 0, 0, ErrDown
	}
	tokens := append(prompt[:len(prompt):len(prompt)], output...)
	size := e.cfg.BlockSize
	e.names = AppendNames(e.names[:0], e.seed, size, tokens)
	inPrompt := len(prompt) / size
	device = e.cache.Hit(e.names)
	if e.host != nil && device < inPrompt {
		host = e.host.Hit(e.names[device:inPrompt])
	}
	step := e.stored(nil, session, tokens, device, inPrompt)
	e.gone = e.cache.Use(e.names, e.gone[:0])
	return min(device, inPrompt), host, e.announce(e.evicted(step))
}

// stored appends the events of the names after the first held names, with a single event for the rest of the prompt.
func (e *Engine) stored(step []Announced, session string, tokens []uint32, held, inPrompt int) []Announced {
	size := e.cfg.BlockSize
	store := func(from, to int) {
		a := Announced{Kind: events.Stored, Tier: events.Device, Session: session, Blocks: e.names[from:to:to],
			Tokens: tokens[from*size : to*size : to*size]}
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
	return step
}

// evicted appends the events of the blocks that left the device, which move to host memory.
func (e *Engine) evicted(step []Announced) []Announced {
	add := func(kind events.Kind, tier events.Tier, list []events.BlockHash) {
		for i := range list {
			step = append(step, Announced{Kind: kind, Tier: tier, Blocks: list[i : i+1 : i+1]})
		}
	}
	if e.host != nil {
		e.lost = e.lost[:0]
		for i, name := range e.gone {
			if !e.host.Holds(name) {
				add(events.Stored, events.Host, e.gone[i:i+1])
			}
			n := len(e.lost)
			e.lost = e.host.Use(e.gone[i:i+1], e.lost)
			add(events.Removed, events.Host, e.lost[n:])
		}
	}
	add(events.Removed, events.Device, e.gone)
	return step
}

// Clear empties the cache and announces the clear.
func (e *Engine) Clear() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return ErrDown
	}
	e.cache.Clear()
	if e.host != nil {
		e.host.Clear()
	}
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

// publish sends a batch as a message.
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

// Garble publishes an undecodable message.
func (e *Engine) Garble() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return ErrDown
	}
	seq := e.seq
	e.seq++
	return e.send(seq, []byte{0xc1}) // an unused type byte in MessagePack
}

// send sends a message and keeps it for replay, unless the message is to be dropped.
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

// Drop does not send the next n messages. If keep is true, a replay still returns them.
func (e *Engine) Drop(n int, keep bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for range n {
		e.drops = append(e.drops, keep)
	}
}

// Crash ends this life: queued messages are lost, connections break, and no event is announced. A second call is
// harmless.
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
	// A process that this process starts meanwhile has copies of the closed sockets until its exec.
	for deadline := time.Now().Add(rebindWithin); ; time.Sleep(time.Millisecond) {
		if err := e.up(); !errors.Is(err, syscall.EADDRINUSE) || time.Now().After(deadline) {
			return err
		}
	}
}

// rebindWithin is the longest wait of [Engine.Restart] for the addresses of the life before.
const rebindWithin = 10 * time.Second

// Stop ends the engine permanently. A second call is harmless.
func (e *Engine) Stop() {
	e.Crash()
	e.replays.Wait()
}

// State is the state of an engine with counters.
type State struct {
	Life    int
	NextSeq events.EngineSeq
	Blocks  []events.BlockHash // held, the least recently used first
	Host    []events.BlockHash // the same of host memory
	Dropped uint64             // messages lost by slow subscribers in this life
}

// State returns the state of the engine.
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
	if e.host != nil {
		s.Host = slices.Collect(e.host.All())
	}
	s.Dropped = e.pub.Stats().Dropped
	return s
}

// Hit returns the number of the prompt's cached blocks. It does not change the cache.
func (e *Engine) Hit(prompt []uint32) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.pub == nil {
		return 0
	}
	e.names = AppendNames(e.names[:0], e.seed, e.cfg.BlockSize, prompt)
	return e.cache.Hit(e.names)
}

// WaitSubscribers waits for n subscribers in this life.
func (e *Engine) WaitSubscribers(ctx context.Context, n int) error {
	e.mu.Lock()
	pub := e.pub
	e.mu.Unlock()
	if pub == nil {
		return ErrDown
	}
	return pub.WaitSubscribers(ctx, n)
}

// endOfReplay is the sequence at the end of a replay: -1.
var endOfReplay = []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// answer serves replay requests as vLLM does. A request other than ["", u64 BE] gets no reply. A request for dropped
// messages gets the rest of the kept messages. Replies beyond the high-water mark are dropped.
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

// keptFrom returns the messages for a replay, if the life of the router is the current life.
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
	// An undeliverable reply is lost, as in a real engine. The reader detects the gap.
	if e.cfg.Release.replayHasTopic() {
		_ = router.Send(to, nil, []byte(topic), seq, payload)
		return
	}
	_ = router.Send(to, nil, seq, payload)
}
