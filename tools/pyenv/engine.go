package pyenv

import "testing"

// EngineOptions are the options of integration/python/engine.py, where each is explained.
type EngineOptions struct {
	Wheel    string       `json:"wheel"` // from [Wheel]
	Topic    string       `json:"topic,omitempty"`
	Endpoint string       `json:"endpoint,omitempty"` // where to bind; the default is a port of the system's choice
	Replay   string       `json:"replay,omitempty"`
	Buffer   int          `json:"buffer,omitempty"`
	Cache    *EngineCache `json:"cache,omitempty"`
}

// EngineCache asks for vLLM's cache manager.
type EngineCache struct {
	BlockSize int      `json:"block_size"` // tokens
	Blocks    int      `json:"blocks"`
	Groups    []string `json:"groups"` // full, swa:TOKENS, chunked:TOKENS, mamba:align, mamba:all
	Lookahead int      `json:"lookahead,omitempty"`
	Eagle     bool     `json:"eagle,omitempty"`

	Offload *EngineOffload `json:"offload,omitempty"`
	LMCache *EngineLMCache `json:"lmcache,omitempty"`
}

// EngineLMCache asks for LMCache's event channel behind the cache manager.
type EngineLMCache struct {
	Wheel  string `json:"wheel"` // from [Wheel]
	Chunk  int    `json:"chunk"` // tokens
	Chunks int    `json:"chunks"`
	Log    int    `json:"log"` // records that the server keeps
}

// EngineOffload asks for vLLM's offloading connector behind the cache manager.
type EngineOffload struct {
	BlocksPerChunk int    `json:"blocks_per_chunk"`
	Chunks         int    `json:"chunks"` // in host memory
	SelfDescribing bool   `json:"self_describing"`
	Policy         string `json:"policy"` // lru or arc
}

// Engine is a running integration/python/engine.py: an engine's own publisher, out of its wheel. Its methods fail the
// test if it does not do as told. They are for one goroutine.
type Engine struct {
	Endpoint string // where readers dial
	Replay   string // where they ask for replay

	driver
}

// StartEngine starts an engine's publisher that lives until the test ends.
func StartEngine(t testing.TB, opt EngineOptions) *Engine {
	t.Helper()
	e := &Engine{driver: startDriver(t, PythonWith(t, "engines.txt"), "engine.py", opt)}
	e.answer(e)
	return e
}

// Publish announces events, each with its type and its fields as the engine names them, in one message.
func (e *Engine) Publish(events ...map[string]any) {
	e.t.Helper()
	e.Do(command{"op": "batch", "events": events}, nil)
}

// Lose loses the next n messages on their way to those who listen; they can be replayed.
func (e *Engine) Lose(n int) {
	e.t.Helper()
	e.Do(command{"op": "lose", "n": n}, nil)
}
