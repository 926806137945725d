package pyenv

import "testing"

// EngineOptions are the options of integration/python/engine.py, which documents them.
type EngineOptions struct {
	Wheel    string       `json:"wheel"` // from [Wheel]
	Topic    string       `json:"topic,omitempty"`
	Endpoint string       `json:"endpoint,omitempty"` // where to bind; the default is a port of the system's choice
	Replay   string       `json:"replay,omitempty"`
	Buffer   int          `json:"buffer,omitempty"`
	Cache    *EngineCache `json:"cache,omitempty"`
}

// EngineCache enables vLLM's cache manager.
type EngineCache struct {
	BlockSize int      `json:"block_size"` // tokens
	Blocks    int      `json:"blocks"`
	Groups    []string `json:"groups"` // full, swa:TOKENS, chunked:TOKENS, mamba:align, mamba:all
	Lookahead int      `json:"lookahead,omitempty"`
	Eagle     bool     `json:"eagle,omitempty"`

	Offload *EngineOffload `json:"offload,omitempty"`
	LMCache *EngineLMCache `json:"lmcache,omitempty"`
}

// EngineLMCache enables LMCache's event channel behind the cache manager.
type EngineLMCache struct {
	Wheel  string `json:"wheel"` // from [Wheel]
	Chunk  int    `json:"chunk"` // tokens
	Chunks int    `json:"chunks"`
	Log    int    `json:"log"` // records that the server keeps
}

// EngineOffload enables vLLM's offloading connector behind the cache manager.
type EngineOffload struct {
	BlocksPerChunk int    `json:"blocks_per_chunk"`
	Chunks         int    `json:"chunks"` // in host memory
	SelfDescribing bool   `json:"self_describing"`
	Policy         string `json:"policy"` // lru or arc
}

// Engine is a running integration/python/engine.py: an engine's own publisher from a wheel. The methods fail the test
// on errors. They are not safe for concurrent use.
type Engine struct {
	Endpoint string // where readers dial
	Replay   string // endpoint for replay requests

	driver
}

// StartEngine starts an engine's publisher that runs until the end of the test.
func StartEngine(t testing.TB, opt EngineOptions) *Engine {
	t.Helper()
	e := &Engine{driver: startDriver(t, PythonWith(t, "engines.txt"), "engine.py", opt)}
	e.answer(e)
	return e
}

// Publish publishes events in a single message. The types and fields have the engine's names.
func (e *Engine) Publish(events ...map[string]any) {
	e.t.Helper()
	e.Do(command{"op": "batch", "events": events}, nil)
}

// Lose drops the next n messages for subscribers. A replay still returns them.
func (e *Engine) Lose(n int) {
	e.t.Helper()
	e.Do(command{"op": "lose", "n": n}, nil)
}
