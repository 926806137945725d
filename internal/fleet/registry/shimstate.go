package registry

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// impaired has the ranks with a remark in answers: their engines are away, or their shims are behind. Queries read it,
// and pay a single atomic load while it is empty.
type impaired struct {
	count atomic.Int64

	mu    sync.RWMutex
	ranks map[events.RankKey]ShimState
}

// note updates the state of a rank.
func (u *impaired) note(key events.RankKey, s ShimState) {
	if !s.CatchingUp && away(s.Engine) == "" {
		u.forget(key)
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ranks == nil {
		u.ranks = map[events.RankKey]ShimState{}
	}
	u.ranks[key] = s
	u.count.Store(int64(len(u.ranks)))
}

// forget removes the remark about a rank.
func (u *impaired) forget(key events.RankKey) {
	if u.count.Load() == 0 { // writers hold the registry's lock
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.ranks, key)
	u.count.Store(int64(len(u.ranks)))
}

// away returns an engine's state for an answer: empty for a connected engine.
func away(s api.EngineState) api.EngineState {
	if s == api.EngineConnected {
		return ""
	}
	return s
}

// mark adds the states of the ranks to an answer.
func (u *impaired) mark(a *api.Answer) {
	if a == nil || u.count.Load() == 0 {
		return
	}
	u.mu.RLock()
	defer u.mu.RUnlock()
	for i := range a.Workers {
		o := &a.Workers[i]
		if s, ok := u.ranks[events.RankKey{Instance: o.Instance, Rank: o.Rank}]; ok {
			o.Engine, o.CatchingUp = away(s.Engine), s.CatchingUp
		}
	}
}

// Warnings returns a line for operators about each kind of rank with answers that may differ from the engine's current
// blocks. Warnings is safe for concurrent use.
func (r *Registry) Warnings() (notes []string) {
	u := &r.impaired
	ranks := map[string][]events.RankKey{}
	u.mu.RLock()
	for key, s := range u.ranks {
		if s.CatchingUp {
			ranks["catching_up"] = append(ranks["catching_up"], key)
		}
		if state := away(s.Engine); state != "" {
			ranks[string(state)] = append(ranks[string(state)], key)
		}
	}
	u.mu.RUnlock()
	for _, n := range []struct{ what, means string }{
		{"catching_up", "their shims still publish earlier events of their engines"},
		{string(api.EngineSilent), "their engines do not answer"},
		{string(api.EngineGone), "their engines have ended"},
		{string(api.EngineAsleep), "their engines sleep"},
	} {
		list := ranks[n.what]
		if len(list) == 0 {
			continue
		}
		slices.SortFunc(list, events.RankKey.Compare)
		notes = append(notes, fmt.Sprintf("%s: %d ranks, %s: %s", n.what, len(list), n.means, First(list)))
	}
	return notes
}

// First formats the first few elements of a list, and the number of the others.
func First[T any](list []T) string {
	var names []string
	for _, x := range list[:min(len(list), maxNamed)] {
		names = append(names, fmt.Sprint(x))
	}
	if n := len(list) - len(names); n > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names, ", "), n)
	}
	return strings.Join(names, ", ")
}

// sameButState reports whether two records of a rank differ only in the shim's state.
func sameButState(a, b Record) bool {
	a.Shim, b.Shim = nil, nil
	return reflect.DeepEqual(a, b)
}

// MarkAnswer adds the states of engines and shims to an answer.
func (r *Registry) MarkAnswer(a *api.Answer) { r.impaired.mark(a) }

// maxNamed is the maximum number of ranks that a problem or note names.
const maxNamed = 5

// goneLong is the time after which a gone engine is a problem. A start takes minutes with a large model.
const goneLong = 10 * time.Minute

// MarkStatus adds the states of ranks to a status. Only the node that would end the leases reports problems, so a
// cluster reports each problem once.
func (r *Registry) MarkStatus(s *api.Status) {
	r.markClaims(s)
	r.markNames(s)
	s.Engines = &api.EngineCounts{}
	var found findings
	for _, w := range r.Workers() {
		state := w.state()
		countEngine(s.Engines, state)
		if w.skipped != nil {
			s.Engines.Skipped++
		}
		if r.cfg.Mine(w.Partition) {
			found.add(w, state, r.cfg.ShimsWait(w.Partition))
		}
	}
	s.Problems = append(s.Problems, found.engineProblems()...)
	r.markSkipped(s)
	s.Problems = append(s.Problems, found.shimProblems()...)
	s.Warnings = append(s.Warnings, found.warnings()...)
}

func countEngine(n *api.EngineCounts, state ShimState) {
	if state.CatchingUp {
		n.CatchingUp++
	}
	switch state.Engine {
	case api.EngineConnected:
		n.Connected++
	case api.EngineSilent:
		n.Silent++
	case api.EngineGone:
		n.Gone++
	case api.EngineAsleep:
		n.Asleep++
	case api.EngineRemote:
		n.Remote++
	default:
		n.Unknown++
	}
}

// findings has the ranks with problems or notes, by kind. An element is the name of a rank, most with details.
type findings struct {
	silent, gone                                []string // engines
	refused, skipped, slowed, several, unusable []string // problems of shims
	remote, quiet                               []string // for warnings
}

// add adds a rank. waitShown means that the status already has the waiting shims of the rank's partition.
func (f *findings) add(w Worker, state ShimState, waitShown bool) {
	name := w.Record.Key().String()
	engine := func() string {
		return fmt.Sprintf("%s (on %s since %s: %s)", name, w.Record.Holder.Host, state.Since.UTC().Format(time.RFC3339),
			state.Why)
	}
	switch {
	case state.Engine == api.EngineSilent:
		f.silent = append(f.silent, engine())
	case state.Engine == api.EngineGone && time.Since(state.Since) >= goneLong:
		f.gone = append(f.gone, engine())
	case state.Engine == api.EngineRemote:
		f.remote = append(f.remote, name)
	}
	if w.skipped != nil {
		f.skipped = append(f.skipped, fmt.Sprintf("%s: %v", name, w.skipped))
	}
	if state.Quiet {
		f.quiet = append(f.quiet, name)
	}
	detailed := func(list *[]string, detail string) {
		if detail != "" {
			*list = append(*list, name+": "+detail)
		}
	}
	detailed(&f.unusable, state.Unusable)
	detailed(&f.slowed, state.Slowed)
	detailed(&f.several, state.Several)
	if !waitShown {
		detailed(&f.refused, state.Refused)
	}
}

func (f *findings) engineProblems() (problems []string) {
	for _, p := range []struct {
		ranks      []string
		what, does string
	}{
		{f.silent, "do not answer their shims; their last blocks keep the credit, because the engines may still hold the blocks",
			"check whether their processes hang or are stopped and whether their hosts can be reached, and restart them " +
				"if they do not go on; a shim with --engine-gone-after clears them by itself"},
		{f.gone, "have been gone for long: their blocks in device and host memory are cleared",
			"start them again, or stop their shims too"},
	} {
		if len(p.ranks) > 0 {
			problems = append(problems, fmt.Sprintf("engines of %d ranks %s: %s; what to do: %s", len(p.ranks), p.what,
				First(p.ranks), p.does))
		}
	}
	return problems
}

func (f *findings) shimProblems() (problems []string) {
	for _, p := range []struct {
		ranks []string
		what  string // with the number of ranks
	}{
		{f.refused, "the log takes nothing from the shims of %d ranks, which wait"},
		{f.skipped, "a part of the registrations of %d ranks is not used"},
		{f.slowed, "the log stores events of the shims of %d ranks one by one, which is slower"},
		{f.several, "several engines publish to the shims of %d ranks, which follow one"},
		{f.unusable, "what engines of %d ranks announce is passed over"},
	} {
		if len(p.ranks) > 0 {
			problems = append(problems, fmt.Sprintf(p.what, len(p.ranks))+": "+First(p.ranks))
		}
	}
	return problems
}

func (f *findings) warnings() (warnings []string) {
	if n := len(f.remote); n > 0 {
		warnings = append(warnings, fmt.Sprintf("the blocks of %d ranks are unknown, since the ranks publish their events "+
			"on other hosts: %s; what to do: %s", n, First(f.remote), RemoteRemedy))
	}
	if n := len(f.quiet); n > 0 {
		warnings = append(warnings, fmt.Sprintf("%s%d ranks have published no event yet: %s; what to do: %s", QuietWarning, n,
			First(f.quiet), QuietAdvice))
	}
	return warnings
}

// QuietWarning is the start of the warning about engines that never published an event.
const QuietWarning = "quiet engines: "

// QuietAdvice is the advice about such engines. Without requests, they are normal.
const QuietAdvice = "nothing, if they had no requests yet; else check that they publish KV-cache events, and that their " +
	"shims have the right endpoint, topic or subject"

// RemoteRemedy is the remedy for ranks that publish their events on another host.
const RemoteRemedy = "run worker-shim on each of these hosts, with --engine, --rank, --ranks and the same --worker"
