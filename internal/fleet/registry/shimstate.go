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
	problems := map[api.EngineState][]string{}
	var unusable, refused, skipped, slowed, quiet, remote, several []string
	for _, w := range r.Workers() {
		standing := w.state()
		if standing.CatchingUp {
			s.Engines.CatchingUp++
		}
		switch standing.Engine {
		case api.EngineConnected:
			s.Engines.Connected++
		case api.EngineSilent:
			s.Engines.Silent++
		case api.EngineGone:
			s.Engines.Gone++
		case api.EngineAsleep:
			s.Engines.Asleep++
		case api.EngineRemote:
			s.Engines.Remote++
			if r.cfg.Mine(w.Partition) {
				remote = append(remote, w.Record.Key().String())
			}
		default:
			s.Engines.Unknown++
		}
		if w.skipped != nil {
			s.Engines.Skipped++
			if r.cfg.Mine(w.Partition) {
				skipped = append(skipped, fmt.Sprintf("%s: %v", w.Record.Key(), w.skipped))
			}
		}
		if standing.Unusable != "" && r.cfg.Mine(w.Partition) {
			unusable = append(unusable, fmt.Sprintf("%s: %s", w.Record.Key(), standing.Unusable))
		}
		if standing.Refused != "" && r.cfg.Mine(w.Partition) && !saysHowShimsWait(s, w.Partition) {
			refused = append(refused, fmt.Sprintf("%s: %s", w.Record.Key(), standing.Refused))
		}
		if standing.Quiet && r.cfg.Mine(w.Partition) {
			quiet = append(quiet, w.Record.Key().String())
		}
		if standing.Slowed != "" && r.cfg.Mine(w.Partition) {
			slowed = append(slowed, fmt.Sprintf("%s: %s", w.Record.Key(), standing.Slowed))
		}
		if standing.Several != "" && r.cfg.Mine(w.Partition) {
			several = append(several, fmt.Sprintf("%s: %s", w.Record.Key(), standing.Several))
		}
		unhealthy := standing.Engine == api.EngineSilent || standing.Engine == api.EngineGone &&
			time.Since(standing.Since) >= goneLong
		if unhealthy && r.cfg.Mine(w.Partition) {
			problems[standing.Engine] = append(problems[standing.Engine],
				fmt.Sprintf("%s (on %s since %s: %s)", w.Record.Key(), w.Record.Holder.Host,
					standing.Since.UTC().Format(time.RFC3339), standing.Why))
		}
	}
	s.Problems = append(s.Problems, engineProblems(problems)...)
	if len(remote) > 0 {
		s.Warnings = append(s.Warnings, fmt.Sprintf("the blocks of %d ranks are unknown, since the ranks publish their events on "+
			"other hosts: %s; what to do: %s", len(remote), First(remote), RemoteRemedy))
	}
	r.markSkipped(s)
	if len(refused) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("the log takes nothing from the shims of %d ranks, which wait: %s",
			len(refused), First(refused)))
	}
	if len(skipped) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("a part of the registrations of %d ranks is not used: %s",
			len(skipped), First(skipped)))
	}
	if len(slowed) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf(
			"the log stores events of the shims of %d ranks one by one, which is slower: %s", len(slowed), First(slowed)))
	}
	if len(quiet) > 0 {
		s.Warnings = append(s.Warnings, fmt.Sprintf("%s%d ranks have published no event yet: %s; what to do: %s",
			QuietWarning, len(quiet), First(quiet), QuietAdvice))
	}
	if len(several) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("several engines publish to the shims of %d ranks, which follow one: %s",
			len(several), First(several)))
	}
	if len(unusable) > 0 {
		s.Problems = append(s.Problems, fmt.Sprintf("what engines of %d ranks announce is passed over: %s",
			len(unusable), First(unusable)))
	}
}

// QuietWarning is the start of the warning about engines that never published an event.
const QuietWarning = "quiet engines: "

// QuietAdvice is the advice about such engines. Without requests, they are normal.
const QuietAdvice = "nothing, if they had no requests yet; else see that they publish KV-cache events, and that their " +
	"shims have the right endpoint, topic or subject"

// saysHowShimsWait reports whether a status already has the waiting shims of a partition.
func saysHowShimsWait(s *api.Status, p events.Partition) bool {
	return slices.ContainsFunc(s.Problems, func(said string) bool {
		return strings.HasPrefix(said, fmt.Sprintf("partition %d: ", p)) && strings.Contains(said, " shims wait, ")
	})
}

func engineProblems(ranks map[api.EngineState][]string) (problems []string) {
	for _, p := range []struct {
		state      api.EngineState
		what, does string
	}{
		{api.EngineSilent,
			"do not answer their shims; they keep the credit for their last blocks, as they may still hold them",
			"see whether their processes hang or are stopped and whether their hosts can be reached, and restart them " +
				"if they do not go on; a shim with --engine-gone-after clears them by itself"},
		{api.EngineGone, "have been gone for long: their blocks in device and host memory are cleared",
			"start them again, or stop their shims too"},
	} {
		if list := ranks[p.state]; len(list) > 0 {
			problems = append(problems, fmt.Sprintf("engines of %d ranks %s: %s; what to do: %s", len(list), p.what,
				First(list), p.does))
		}
	}
	return problems
}

// RemoteRemedy is the remedy for ranks that publish their events on another host.
const RemoteRemedy = "run worker-shim on each of these hosts, with --engine, --rank, --ranks and the same --worker"
