package pyenv

import (
	"encoding/hex"
	"testing"
)

// PublisherOptions are the options of integration/python/publisher.py, which documents them. The zero value is a
// publisher of a current vLLM with ports from the system.
type PublisherOptions struct {
	Form        string     `json:"form,omitempty"`         // "map" or "array"
	ReplayTopic *bool      `json:"replay_topic,omitempty"` // whether replies carry the topic
	Endpoint    string     `json:"endpoint,omitempty"`     // where to bind or, with Connect, to dial
	Connect     bool       `json:"connect,omitempty"`
	Replay      string     `json:"replay,omitempty"`
	NoReplay    bool       `json:"no_replay,omitempty"`
	Socket      string     `json:"socket,omitempty"` // "XPUB" or "PUB"
	Topic       string     `json:"topic,omitempty"`
	Rank        int        `json:"rank,omitempty"`
	Buffer      int        `json:"buffer,omitempty"` // batches kept for replay
	HighWater   int        `json:"hwm,omitempty"`
	Heartbeat   *Heartbeat `json:"heartbeat,omitempty"`
	BlockSize   int        `json:"block_size,omitempty"`
	Seed        string     `json:"seed,omitempty"`   // of the engine's hashes
	Hashes      string     `json:"hashes,omitempty"` // "int" or "bytes"
	FirstSeq    uint64     `json:"first_seq,omitempty"`
}

// Heartbeat sets ZMTP heartbeats, in milliseconds.
type Heartbeat struct {
	Interval int `json:"ivl"`
	Timeout  int `json:"timeout"`
}

// Event is an event for publication.
type Event struct {
	Op       string   `json:"op"` // "store", "remove" or "clear"
	Tokens   []uint32 `json:"tokens,omitempty"`
	Parent   *uint64  `json:"parent,omitempty"`
	Hashes   []uint64 `json:"hashes,omitempty"` // of "remove"; of "store" only to dictate them
	Medium   string   `json:"medium,omitempty"` // default GPU
	LoraID   *int     `json:"lora_id,omitempty"`
	LoraName string   `json:"lora_name,omitempty"`
	Salt     string   `json:"salt,omitempty"`
	Group    *int     `json:"group,omitempty"`
	Kind     string   `json:"kind,omitempty"`
	Window   *int     `json:"window,omitempty"`
}

// Publisher is a running integration/python/publisher.py. The methods fail the test on errors. They are not safe for
// concurrent use.
type Publisher struct {
	Endpoint string // where readers dial
	Replay   string // endpoint for replay requests; empty without replay

	driver
}

// StartPublisher starts a publisher that runs until the end of the test.
func StartPublisher(t testing.TB, opt PublisherOptions) *Publisher {
	t.Helper()
	p := &Publisher{driver: startDriver(t, Python(t), "publisher.py", opt)}
	p.answer(p)
	return p
}

type command map[string]any

// Publish publishes events in a single message. It returns the sequence and the engine hashes of every event.
func (p *Publisher) Publish(events ...Event) (seq uint64, hashes [][]uint64) {
	p.t.Helper()
	var got struct {
		Seq    uint64
		Hashes [][]uint64
	}
	p.Do(command{"op": "batch", "events": events}, &got)
	return got.Seq, got.Hashes
}

// Store announces the full blocks of tokens after the block parent, or at the start of a prompt if parent is nil. It
// returns the engine hashes.
func (p *Publisher) Store(tokens []uint32, parent *uint64) (seq uint64, hashes []uint64) {
	p.t.Helper()
	seq, all := p.Publish(Event{Op: "store", Tokens: tokens, Parent: parent})
	return seq, all[0]
}

// Remove announces the removal of blocks from the device.
func (p *Publisher) Remove(hashes ...uint64) (seq uint64) {
	p.t.Helper()
	seq, _ = p.Publish(Event{Op: "remove", Hashes: hashes})
	return seq
}

// Clear announces an empty cache.
func (p *Publisher) Clear() (seq uint64) {
	p.t.Helper()
	seq, _ = p.Publish(Event{Op: "clear"})
	return seq
}

// Raw publishes any payload with the next sequence.
func (p *Publisher) Raw(payload []byte) (seq uint64) {
	p.t.Helper()
	var got struct{ Seq uint64 }
	p.Do(command{"op": "raw", "payload": hex.EncodeToString(payload)}, &got)
	return got.Seq
}

// Frames publishes any frames at all.
func (p *Publisher) Frames(frames ...[]byte) {
	p.t.Helper()
	texts := make([]string, len(frames))
	for i, f := range frames {
		texts[i] = hex.EncodeToString(f)
	}
	p.Do(command{"op": "frames", "frames": texts}, nil)
}

// Burst describes the messages of a burst.
type Burst struct {
	FirstSeq uint64   `json:"first_seq"`
	LastSeq  uint64   `json:"last_seq"`
	Tokens   int      `json:"tokens"` // the prompt's length; its tokens count up from first
	Hashes   []uint64 `json:"hashes"`
}

// Burst publishes n messages as fast as possible. Every message appends blocks to the same prompt. The prompt's tokens
// count up from first.
func (p *Publisher) Burst(n, blocks int, first uint32) (b Burst) {
	p.t.Helper()
	p.Do(command{"op": "burst", "n": n, "blocks": blocks, "first_token": first}, &b)
	return b
}

// Drop does not send the next n messages. If keep is true, a replay still returns them.
func (p *Publisher) Drop(n int, keep bool) {
	p.t.Helper()
	p.Do(command{"op": "drop", "n": n, "keep": keep}, nil)
}

// Skip leaves out n sequence numbers for ever.
func (p *Publisher) Skip(n int) {
	p.t.Helper()
	p.Do(command{"op": "skip", "n": n}, nil)
}

// Forget keeps only the last keep messages for replay.
func (p *Publisher) Forget(keep int) {
	p.t.Helper()
	p.Do(command{"op": "forget", "keep": keep}, nil)
}

// ReplayMode is how requests for replay are dealt with: "answer", "mute" or "endless".
func (p *Publisher) ReplayMode(mode string) {
	p.t.Helper()
	p.Do(command{"op": "replay_mode", "mode": mode}, nil)
}

// Restart begins a new life of the engine at the same endpoints.
func (p *Publisher) Restart() {
	p.t.Helper()
	p.Do(command{"op": "restart"}, nil)
}

// RestartUnseen begins a new life without closing the sockets: readers see no new connection.
func (p *Publisher) RestartUnseen() {
	p.t.Helper()
	p.Do(command{"op": "restart", "sockets": false}, nil)
}

// WaitSubscribers waits until n subscriptions are in force.
func (p *Publisher) WaitSubscribers(n int) {
	p.t.Helper()
	p.Do(command{"op": "subscribers", "n": n}, nil)
}

// PublisherStats has the counters of a publisher.
type PublisherStats struct {
	NextSeq     uint64 `json:"next_seq"`
	Subscribers int    `json:"subscribers"`
	Replays     int    `json:"replays"` // requests so far
	Kept        int    `json:"kept"`    // messages that can be replayed
}

// Stats counts.
func (p *Publisher) Stats() (s PublisherStats) {
	p.t.Helper()
	p.Do(command{"op": "stats"}, &s)
	return s
}
