package enginehttp

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
)

// SleepCheck detects whether an engine sleeps. vLLM discards its KV cache when it goes to sleep, at every level. It
// announces the loss with its next step, after it has woken up.
//
//	GET /metrics       vllm:engine_sleep_state: awake is 0 while it sleeps
//	GET /is_sleeping   in vLLM's development mode only, which has /sleep too; true also between a partial wake-up
//	                   (tags=weights) and the last one
//
// The engine sleeps if either route reports it. SGLang has no such route: it announces the release of its cache at
// once. A SleepCheck is for one goroutine at a time.
type SleepCheck struct {
	asker             *Asker
	noMetric, noRoute bool // the engine does not have the source
	checks            int  // since both sources were tried
}

// NewSleepCheck returns a check of the asker's engine.
func (a *Asker) NewSleepCheck() *SleepCheck { return &SleepCheck{asker: a} }

const (
	sleepTimeout = 2 * time.Second // of each request
	lookAgain    = 30              // checks before a missing route is tried again
)

// Ask reports whether the engine sleeps. known is false if the engine does not report its sleep. The error wraps
// ErrNotReady or ErrUnknown.
func (s *SleepCheck) Ask(ctx context.Context) (asleep, known bool, err error) {
	if s.checks++; s.checks > lookAgain {
		s.noMetric, s.noRoute, s.checks = false, false, 0
	}
	for _, source := range []struct {
		missing *bool
		path    string
		read    func([]byte) (asleep, there bool)
	}{{&s.noMetric, "/metrics", sleepMetric}, {&s.noRoute, "/is_sleeping", sleepRoute}} {
		if *source.missing {
			continue
		}
		asking, cancel := context.WithTimeout(ctx, sleepTimeout)
		body, status, failed := s.asker.get(asking, source.path)
		cancel()
		if failed != nil {
			err = failed
			continue
		}
		sleeps, there := false, false
		if status == http.StatusOK {
			sleeps, there = source.read(body)
		}
		*source.missing = !there
		asleep, known = asleep || sleeps, known || there
	}
	if asleep {
		err = nil
	}
	return asleep, known, err
}

var sleepState = regexp.MustCompile(`(?m)^vllm:engine_sleep_state\{(.*)\}\s+(\S+)`)

// sleepMetric reads the metric. A server with several engines has a line for each, and puts all engines to sleep.
func sleepMetric(body []byte) (asleep, there bool) {
	for _, m := range sleepState.FindAllSubmatch(body, -1) {
		if strings.Contains(string(m[1]), `sleep_state="awake"`) {
			there = true
			asleep = asleep || string(m[2]) == "0" || string(m[2]) == "0.0"
		}
	}
	return asleep, there
}

func sleepRoute(body []byte) (asleep, there bool) {
	var answer struct {
		Sleeping *bool `json:"is_sleeping"`
	}
	if strictjson.Unmarshal(body, &answer) != nil || answer.Sleeping == nil {
		return false, false
	}
	return *answer.Sleeping, true
}
