package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Limits of model claims.
const (
	maxClaims    = 64               // claims of a worker; further claims are ignored and deleted
	claimGrace   = 30 * time.Minute // time until claims of unused workers are deleted; longer than a third of [MaxLease]
	claimSweep   = time.Minute      // interval of the search for claims without a lease
	unclaimedLog = 10 * time.Minute // minimum interval of reports about the leases of a worker
)

// claimVersion is the version of new claims.
const claimVersion = 1

// claim is the value of a model claim in JSON. The key alone is the claim: nodes do not read the value.
type claim struct {
	Version int `json:"version"`
}

// Claim writes a model claim for a worker without a lease. Nodes delete the claim if the index has had no blocks of the
// worker for half an hour. [Lease.Keep] claims the model of its record by itself.
func Claim(ctx context.Context, ns *jetstream.Namespace, instance events.WorkerID, model string) error {
	return putClaim(ctx, ns.OpenWorkers(), instance, model)
}

// Unclaim deletes all claims of a worker.
func Unclaim(ctx context.Context, ns *jetstream.Namespace, instance events.WorkerID) error {
	bucket := ns.OpenWorkers()
	prefix, err := jetstream.ClaimPrefix(instance)
	if err != nil {
		return err
	}
	keys, err := bucket.Keys(ctx, prefix)
	if errors.Is(err, jetstream.ErrNotFound) {
		return nil // no bucket
	}
	if err != nil {
		return fmt.Errorf("list the model claims of worker %q: %w", instance, err)
	}
	for _, key := range keys {
		entry, err := bucket.Latest(ctx, key)
		if err == nil {
			_, err = bucket.Delete(ctx, key, entry.Revision)
		}
		if err != nil && !errors.Is(err, jetstream.ErrNotFound) && !errors.Is(err, jetstream.ErrConflict) {
			return err
		}
	}
	return nil
}

// putClaim writes a claim over any earlier value. A node deletes an abandoned claim by compare-and-set, so a rewritten
// claim stays. The writer needs no permission to read.
func putClaim(ctx context.Context, bucket *jetstream.Bucket, instance events.WorkerID, model string) error {
	key, err := jetstream.ClaimKey(instance, model)
	if err != nil {
		return err
	}
	data, err := json.Marshal(claim{Version: claimVersion})
	if err == nil {
		_, err = bucket.Put(ctx, key, data)
	}
	if err != nil {
		return fmt.Errorf("claim model %q for worker %q: %w", model, instance, err)
	}
	return nil
}

// claimKey identifies a claim.
type claimKey struct {
	instance events.WorkerID
	model    string
}

// claims has the models that each worker may serve. The registry's lock guards all fields except required and models.
type claims struct {
	required atomic.Bool // a worker counts only under claimed models
	models   sync.Map    // worker → []string, the claimed models; written under the registry's lock, read without

	known   map[events.WorkerID]map[string]storedClaim
	fresh   map[claimKey]bool                 // keys since the restart of the watch; nil when the watch is current
	surplus map[claimKey]uint64               // claims beyond maxClaims, to be deleted, with revisions
	orphans map[events.WorkerID]time.Duration // time since when workers have claims without a lease and without blocks
	ignored uint64                            // claims beyond maxClaims since the start

	reported *lru.Cache[events.WorkerID, time.Duration] // time of the last report about the leases of a worker
}

// storedClaim is a claim in the bucket.
type storedClaim struct {
	revision uint64
	text     []byte
}

func newClaims() claims {
	reported, _ := lru.New[events.WorkerID, time.Duration](maxExpired) // an error means a size that is not positive
	return claims{known: map[events.WorkerID]map[string]storedClaim{}, surplus: map[claimKey]uint64{},
		orphans: map[events.WorkerID]time.Duration{}, reported: reported}
}

// allows reports whether a worker may serve a model. allows is safe for concurrent use.
func (c *claims) allows(instance events.WorkerID, model string) bool {
	if !c.required.Load() {
		return true
	}
	models, _ := c.models.Load(instance)
	list, _ := models.([]string)
	return slices.Contains(list, model)
}

// see processes an entry of the bucket. For a claim it returns the worker.
func (c *claims) see(e jetstream.Entry) (instance events.WorkerID, is bool) {
	instance, model, is := jetstream.ParseClaimKey(e.Key)
	if !is {
		return "", false
	}
	key, of := claimKey{instance, model}, c.known[instance]
	_, had := of[model]
	switch {
	case e.Deleted:
		c.forget(key)
		return instance, true
	case !had && len(of) >= maxClaims:
		if _, seen := c.surplus[key]; !seen {
			c.ignored++
		}
		c.surplus[key] = e.Revision
		return instance, true
	case of == nil:
		of = map[string]storedClaim{}
		c.known[instance] = of
	}
	if c.fresh != nil {
		c.fresh[key] = true
	}
	of[model] = storedClaim{e.Revision, e.Value}
	delete(c.orphans, instance)
	return instance, true
}

func (c *claims) forget(key claimKey) {
	delete(c.surplus, key)
	delete(c.known[key.instance], key.model)
	if len(c.known[key.instance]) == 0 {
		delete(c.known, key.instance)
		delete(c.orphans, key.instance)
	}
}

// current ends the restart of the watch and returns the workers with removed claims. Claims that will be written into a
// new bucket stay.
func (c *claims) current(lost map[string][]byte) (altered []events.WorkerID) {
	for instance, of := range c.known {
		for model := range of {
			key := claimKey{instance, model}
			name, err := jetstream.ClaimKey(instance, model)
			if c.fresh != nil && !c.fresh[key] && (err != nil || lost[name] == nil) {
				c.forget(key)
				altered = append(altered, instance)
			}
		}
	}
	c.fresh = nil
	return altered
}

// Claimed reports whether queries may use a worker under a model: the worker has claimed the model, or claims are not
// required. Claimed does not block.
func (r *Registry) Claimed(instance events.WorkerID, model string) bool {
	return r.claims.allows(instance, model)
}

// ClaimsRequired reports whether workers count only under claimed models.
func (r *Registry) ClaimsRequired() bool { return r.claims.required.Load() }

// RequireClaims sets whether workers count only under claimed models. RequireClaims is safe for concurrent use.
func (r *Registry) RequireClaims(required bool) {
	for _, call := range r.requireClaims(required) {
		call()
	}
}

func (r *Registry) requireClaims(required bool) (calls []func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.claims.required.Swap(required) == required {
		return nil
	}
	withheld := r.withhold(func(Worker) bool { return true })
	r.admit(func(Worker) bool { return true })
	r.notify() // names count or stop counting as models
	return append(r.report(withheld), r.cfg.ClaimsChanged)
}

// claimsOf updates the claims of a worker. claimsOf reports whether different leases count, and returns the calls that
// follow without the lock. The caller holds r.mu.
func (r *Registry) claimsOf(instance events.WorkerID) (changed bool, calls []func()) {
	models := slices.Sorted(maps.Keys(r.claims.known[instance]))
	before, _ := r.claims.models.Load(instance)
	was, _ := before.([]string)
	if slices.Equal(was, models) {
		return false, nil
	}
	if len(models) == 0 {
		r.claims.models.Delete(instance)
	} else {
		r.claims.models.Store(instance, models)
	}
	if !r.claims.required.Load() {
		return false, nil
	}
	of := func(w Worker) bool { return w.Record.Instance == instance }
	var withheld []Worker
	if slices.ContainsFunc(was, func(model string) bool { return !slices.Contains(models, model) }) {
		withheld = r.withhold(of)
	}
	r.admit(of)
	return true, append(r.report(withheld), r.cfg.ClaimsChanged) // names that are not models count too
}

// admit registers the ranks of matching leases that now count. The caller holds r.mu.
func (r *Registry) admit(of func(Worker) bool) {
	for key, w := range r.unclaimed {
		if of(w) && r.claims.allows(key.Instance, w.Record.Model) {
			delete(r.unclaimed, key)
			r.register(key, w)
		}
	}
}

// withhold removes and returns the ranks of matching leases that no longer count. The caller holds r.mu.
func (r *Registry) withhold(of func(Worker) bool) (list []Worker) {
	for key, w := range r.workers {
		if of(w) && !r.claims.allows(key.Instance, w.Record.Model) {
			delete(r.workers, key)
			r.alter(key.Instance)
			r.forget(key)
			r.unclaimed[key] = w
			list = append(list, w)
		}
	}
	return list
}

// report returns the calls that log leases without a claim, one per worker. The caller holds r.mu.
func (r *Registry) report(unclaimed []Worker) (calls []func()) {
	for _, w := range unclaimed {
		instance, now := w.Record.Instance, r.now()
		if last, known := r.claims.reported.Get(instance); !known || now-last >= unclaimedLog {
			r.claims.reported.Add(instance, now)
			calls = append(calls, func() { r.logUnclaimed(w.Record) })
		}
	}
	return calls
}

// leased returns the lease of a rank, even if the lease does not count. The caller holds r.mu.
func (r *Registry) leased(key events.RankKey) (w Worker, there bool) {
	if w, there = r.workers[key]; !there {
		w, there = r.unclaimed[key]
	}
	return w, there
}

// dropLease removes the lease of a rank. The caller holds r.mu.
func (r *Registry) dropLease(key events.RankKey) {
	delete(r.workers, key)
	delete(r.unclaimed, key)
	r.alter(key.Instance)
	r.forget(key)
}

// dueClaim is a claim to delete.
type dueClaim struct {
	claimKey
	revision uint64
	orphan   bool // only if the index holds no blocks of the worker
}

// dueClaims returns the claims that this node deletes now: claims beyond the limit, and claims of workers without a
// lease and without blocks for claimGrace.
func (r *Registry) dueClaims(now time.Duration) (list []dueClaim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.down || r.listing || !r.current {
		return nil
	}
	for key, revision := range r.claims.surplus {
		if r.writes(key.instance) {
			list = append(list, dueClaim{key, revision, false})
		}
	}
	leased := map[events.WorkerID]bool{}
	for _, leases := range []map[events.RankKey]Worker{r.workers, r.unclaimed} {
		for key := range leases {
			leased[key.Instance] = true
		}
	}
	for instance, of := range r.claims.known {
		since, orphan := r.claims.orphans[instance]
		switch {
		case leased[instance]:
			delete(r.claims.orphans, instance)
		case !orphan:
			r.claims.orphans[instance] = now
		case now-since >= claimGrace && r.writes(instance):
			for model, c := range of {
				list = append(list, dueClaim{claimKey{instance, model}, c.revision, true})
			}
		}
	}
	return list
}

// writes reports whether this node ends leases of a worker.
func (r *Registry) writes(instance events.WorkerID) bool {
	p, err := r.cfg.Namespace.PartitionOf(instance)
	return err == nil && r.cfg.Mine(p)
}

// sweepClaims deletes due claims. The next sweep repeats a failed deletion.
func (r *Registry) sweepClaims(ctx context.Context) {
	for _, d := range r.dueClaims(r.now()) {
		used, err := r.used(ctx, d)
		if err == nil && !used {
			err = r.deleteClaim(ctx, d)
		}
		if err != nil {
			return
		}
	}
}

// used reports whether an orphaned claim is needed, because the index holds blocks of the worker. Its grace then
// restarts.
func (r *Registry) used(ctx context.Context, d dueClaim) (bool, error) {
	if !d.orphan || r.cfg.Holds == nil {
		return false, nil
	}
	used, err := r.cfg.Holds(ctx, d.instance)
	if err == nil && used {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.claims.orphans[d.instance] = r.now()
	}
	return used, err
}

// deleteClaim deletes a claim, unless the claim was rewritten.
func (r *Registry) deleteClaim(ctx context.Context, d dueClaim) error {
	name, err := jetstream.ClaimKey(d.instance, d.model)
	if err != nil {
		return err
	}
	if _, err = r.cfg.Bucket.Delete(ctx, name, d.revision); errors.Is(err, jetstream.ErrConflict) {
		return nil
	}
	return err
}

// presentClaims returns the known claims of a worker with their revisions.
func (r *Registry) presentClaims(instance events.WorkerID) (list []dueClaim) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for model, c := range r.claims.known[instance] {
		list = append(list, dueClaim{claimKey{instance, model}, c.revision, false})
	}
	return list
}

// deleteClaims deletes claims, unless they were rewritten.
func (r *Registry) deleteClaims(ctx context.Context, list []dueClaim) error {
	for _, d := range list {
		if err := r.deleteClaim(ctx, d); err != nil {
			return err
		}
	}
	return nil
}

// maxUnclaimed is the maximum number of ranks without a claim that a status names.
const maxUnclaimed = 16

// markClaims adds the workers that do not count to a status. The status already has the index's part.
func (r *Registry) markClaims(s *api.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.Claims == nil {
		s.Claims = &api.ClaimStatus{}
	}
	c := s.Claims
	c.Required, c.Ignored, c.Leases = r.claims.required.Load(), r.claims.ignored, len(r.unclaimed)
	for _, of := range r.claims.known {
		c.Claims += len(of)
	}
	for key, w := range r.unclaimed {
		if !r.cfg.Mine(w.Partition) {
			continue
		}
		rank := api.UnclaimedRank{Instance: key.Instance, Rank: key.Rank, Model: w.Record.Model}
		at := slices.IndexFunc(c.Unclaimed, rank.Same)
		if at < 0 {
			at = len(c.Unclaimed)
			c.Unclaimed = append(c.Unclaimed, rank)
		}
		c.Unclaimed[at].Lease = true
	}
	slices.SortFunc(c.Unclaimed, api.UnclaimedRank.Compare)
	if len(c.Unclaimed) > 0 {
		var names []string
		for i := range c.Unclaimed {
			u := &c.Unclaimed[i]
			names = append(names, fmt.Sprintf("%v (model %q)", events.RankKey{Instance: u.Instance, Rank: u.Rank}, u.Model))
		}
		s.Problems = append(s.Problems, fmt.Sprintf("%s%s; what to do: %s", UnclaimedProblem, First(names), ClaimRemedy))
		c.Unclaimed = c.Unclaimed[:min(len(c.Unclaimed), maxUnclaimed)]
	}
}

// UnclaimedProblem is the start of the problem about ranks without a claim.
const UnclaimedProblem = "ranks are ignored because their workers have not claimed the model: "

// ClaimRemedy is the remedy for a worker under a model without a claim.
const ClaimRemedy = "run a worker-shim of this release, with a NATS user that may claim the model " +
	"(indexer auth create --shim WORKER --model MODEL); if the worker does not serve the model, revoke its NATS key"
