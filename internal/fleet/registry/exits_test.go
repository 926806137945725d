package registry

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestStatesHaveExits drives a rank into each state that excludes the rank from select, and out again. DESIGN.md lists
// the states.
func TestStatesHaveExits(t *testing.T) {
	shim := func(s ShimState) func(*Record) { return func(r *Record) { r.Shim = &s } }
	worker := func(s api.WorkerSpec) func(*Record) { return func(r *Record) { r.Worker = &s } }
	two, one := worker(api.WorkerSpec{RankStart: 4, RankSize: 2}), worker(api.WorkerSpec{})
	for name, c := range map[string]struct {
		enter, leave    func(*Record)
		beside          func(*Record) // another rank of the worker
		ends            bool          // the lease of the other rank ends, in place of leave
		state           api.WorkerState
		why             string
		operator, after *Operator
	}{
		"blocks of another size": {enter: shim(ShimState{Unusable: "blocks of 32 tokens"}), leave: shim(ShimState{}),
			state: api.WorkerIncomplete, why: "blocks of 32 tokens"},
		"the engine has ended": {enter: shim(ShimState{Engine: api.EngineGone, Why: "its ports refuse"}),
			leave: shim(ShimState{Engine: api.EngineConnected}), state: api.WorkerUnschedulable, why: "its engine has ended"},
		"the engine accepts no requests": {enter: shim(ShimState{Unserved: "its serving address refuses"}),
			leave: shim(ShimState{}), state: api.WorkerUnschedulable, why: "its serving address refuses"},
		"the shim has ended the lease": {enter: func(r *Record) {
			r.State, r.Shim = Expired, &ShimState{Engine: api.EngineGone, Stopped: time.Unix(1, 0)}
		}, leave: func(r *Record) { r.State = Held }, state: api.WorkerUnschedulable, why: "its shim has ended its lease"},
		"the shim was stopped": {enter: shim(ShimState{Stopped: time.Unix(1, 0)}), leave: shim(ShimState{}),
			state: api.WorkerSchedulable, why: "its shim was stopped at"},
		"the lease has expired": {enter: func(r *Record) { r.State = Expired }, leave: func(r *Record) { r.State = Held },
			state: api.WorkerUnschedulable, why: "its lease has expired"},
		"the rank is not in the range": {enter: two, leave: one, state: api.WorkerUnschedulable, why: "is not among"},
		"an address that is not used": {enter: worker(api.WorkerSpec{Endpoint: "http://h:1?q"}),
			leave: worker(api.WorkerSpec{Endpoint: "http://h:1"}), state: api.WorkerIncomplete, why: "serving address"},
		"a field of another release": {enter: worker(api.WorkerSpec{Role: "dreaming"}),
			leave: worker(api.WorkerSpec{Role: api.RoleDecode}), state: api.WorkerIncomplete, why: "dreaming"},
		"an address that is not used, until an operator changes it": {enter: worker(api.WorkerSpec{Endpoint: "http://h:1?q"}),
			leave: worker(api.WorkerSpec{Endpoint: "http://h:1?q"}),
			after: &Operator{Change: api.WorkerSpec{Endpoint: "http://h:1"}}, state: api.WorkerIncomplete,
			why: "serving address"},
		"the engine sleeps": {enter: shim(ShimState{Engine: api.EngineAsleep, Why: "it reports so"}),
			leave: shim(ShimState{Engine: api.EngineConnected}), state: api.WorkerUnschedulable, why: "its engine sleeps"},
		"a store that is not used": {enter: func(r *Record) {
			r.L3 = &hicache.Config{SGLang: &hicache.SGLang{Backend: "file", Directory: "/elsewhere"}}
		}, leave: func(*Record) {}, state: api.WorkerSchedulable, why: "its shared store is not used"},
		"two roles": {enter: worker(api.WorkerSpec{Role: api.RoleDecode}),
			leave: worker(api.WorkerSpec{Role: api.RolePrefill}), beside: worker(api.WorkerSpec{Role: api.RolePrefill}),
			state: api.WorkerIncomplete, why: "several roles"},
		"two roles, until the other rank ends": {enter: worker(api.WorkerSpec{Role: api.RoleDecode}),
			beside: worker(api.WorkerSpec{Role: api.RolePrefill}), ends: true, state: api.WorkerIncomplete,
			why: "several roles"},
		"drained": {enter: one, leave: one, operator: &Operator{Drain: &Drain{Since: time.Unix(0, 0)}}, after: &Operator{},
			state: api.WorkerDraining, why: "drained it"},
		"a role that an operator gave": {enter: one, leave: one,
			operator: &Operator{Change: api.WorkerSpec{Role: "dreaming"}}, after: &Operator{}, state: api.WorkerIncomplete,
			why: "dreaming"},
	} {
		r := New(Config{Namespace: &jetstream.Namespace{}})
		r.apply(jetstream.Watched{Anew: true})
		r.apply(jetstream.Watched{Current: true})
		revision := uint64(0)
		put := func(key string, keyErr error, value []byte, err error) {
			if keyErr != nil || err != nil {
				t.Fatal(name, keyErr, err)
			}
			revision++
			r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: key, Value: value, Revision: revision,
				Deleted: value == nil}}})
		}
		step := func(rank events.Rank, change func(*Record), o *Operator) {
			of := record("w", DefaultLease)
			of.Rank = rank
			change(&of)
			key, keyErr := jetstream.WorkerKey(0, of.Key())
			value, err := of.encode()
			put(key, keyErr, value, err)
			if o != nil {
				said := *o
				said.Version, said.Instance = operatorVersion, "w"
				key, keyErr = jetstream.OperatorKey("w")
				value, err = json.Marshal(said)
				put(key, keyErr, value, err)
			}
		}
		is := func(when string, state api.WorkerState, why string) {
			got := r.Pool("m").Ranks[0].Record
			if reasons := strings.Join(got.Reasons, "; "); got.State != state || !strings.Contains(reasons, why) ||
				(why == "") != (reasons == "") {
				t.Errorf("%s, %s: %s because %q, want %s because %q", name, when, got.State, reasons, state, why)
			}
		}
		if c.beside != nil {
			step(1, c.beside, nil)
		}
		step(0, c.enter, c.operator)
		is("entered", c.state, c.why)
		if c.ends {
			key, err := jetstream.WorkerKey(0, events.RankKey{Instance: "w", Rank: 1})
			put(key, err, nil, nil)
		} else {
			step(0, c.leave, c.after)
		}
		is("left", api.WorkerSchedulable, "")
	}
}
