//go:build judges

package mooncake

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/tools/mastersim"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// realStore is a real master with a real client, and what an indexer asks it through: a store that is watched, and a
// cache that never forgets by itself.
type realStore struct {
	*pyenv.Mooncake
	t       *testing.T
	ctx     context.Context
	master  *hicache.Mooncake
	cache   *hicache.Cache
	changed chan string
}

func startRealStore(t *testing.T) *realStore {
	s := &realStore{Mooncake: pyenv.StartMooncake(t), t: t, changed: make(chan string, 1000)}
	s.StartClient()
	var err error
	s.master, err = hicache.NewMooncake(hicache.MooncakeConfig{Address: s.HTTP, MaxKeys: 3,
		Check: 20 * time.Millisecond, Changed: func(why string) {
			s.cache.Forget()
			s.changed <- why
		}})
	if err != nil {
		t.Fatal(err)
	}
	s.cache = hicache.NewCache(s.master, hicache.CacheConfig{HitLife: time.Hour, MissLife: time.Hour})
	var cancel context.CancelFunc
	s.ctx, cancel = context.WithTimeout(context.Background(), 4*harness.Patience)
	watched := make(chan struct{})
	go func() { s.master.Watch(s.ctx); close(watched) }()
	t.Cleanup(func() { cancel(); <-watched })
	return s
}

// askAll has the cache asked for all of a lane.
func (s *realStore) askAll(lane hicache.Lane) *hicache.Question {
	q := s.cache.Begin(lane, 0)
	q.Ask(0, lane.Pages)
	return q
}

// exists asks for keys that can be asked for and wants an answer for all.
func (s *realStore) exists(keys ...string) hicache.Bitmap {
	s.t.Helper()
	present, known, err := s.master.Exists(s.ctx, keys)
	if err != nil || known.Count() != len(keys) {
		s.t.Fatalf("%v, %d of %d known", err, known.Count(), len(keys))
	}
	return present
}

// waitGone asks until no key exists, and says when that was. In between all exist or none.
func (s *realStore) waitGone(keys ...string) time.Time {
	s.t.Helper()
	for ; ; time.Sleep(20 * time.Millisecond) {
		present := s.exists(keys...)
		if present.Count() == 0 {
			return time.Now()
		}
		if s.ctx.Err() != nil {
			s.t.Fatalf("%d of %d objects stay", present.Count(), len(keys))
		}
	}
}

// TestRealMooncakeMaster asks a real master about a real client's objects: hits, misses, odd keys, removal, and the
// client's end.
func TestRealMooncakeMaster(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	odd := []string{"a b", "a+b", "a%2Cb", "pre@m@tp_rank:0/ü|\"\n", "nul\x00", strings.Repeat("long", 500)}
	s.Put(append([]string{"plain"}, odd...)...)
	if _, err := s.master.Health(s.ctx); err != nil {
		t.Fatal(err)
	}
	keys := append([]string{"none", "with,comma", "not\xffutf8", "", "plain"}, odd...)
	present, known, err := s.master.Exists(s.ctx, keys)
	if !errors.Is(err, hicache.ErrKey) {
		t.Errorf("keys that cannot be asked for: %v", err)
	}
	for i, key := range keys {
		if known.Get(i) != (i == 0 || i >= 4) || present.Get(i) != (i >= 4) {
			t.Errorf("%.40q: known %v, present %v", key, known.Get(i), present.Get(i))
		}
	}

	// Why such keys are refused before: the master refuses every key of a batch with one of them.
	res, err := http.Get("http://" + s.HTTP + "/batch_query_keys?keys=plain," + url.QueryEscape("not\xffutf8"))
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("the master says %s to a key that is not UTF-8: it need not be refused any more", res.Status)
	}

	s.Remove("plain")
	if present := s.exists("plain", "a b"); present.Get(0) || !present.Get(1) {
		t.Errorf("after removal: %b", present)
	}
	s.CloseClient()
	s.waitGone("a b", "a+b")
}

// A client that was killed: the master goes on answering for its objects until it misses the client's sign of life.
func TestRealMooncakeClientKilled(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	keys := []string{"one", "two", "three"}
	s.Put(keys...)
	s.KillClient()
	killed := time.Now()
	present := s.exists(keys...)
	if soon := time.Since(killed) < 3*time.Second; soon && present.Count() != 3 {
		t.Errorf("%d of 3 objects right after their owner's death; docs/l3.md says that they are answered for",
			present.Count())
	}
	took := s.waitGone(keys...).Sub(killed)
	t.Logf("the master answered for a dead client's objects for %v", took)
	if took < 3*time.Second {
		t.Errorf("the master answered for a dead client's objects for %v only; docs/l3.md says ten seconds", took)
	}
}

// Objects that the master evicts are not there any more, and no others.
func TestRealMooncakeEviction(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	const size = 1 << 20
	var keys []string
	for i := range 2 * pyenv.ClientMemory / size {
		keys = append(keys, fmt.Sprintf("large-%d", i))
	}
	s.PutLarge(size, keys...)
	// The master evicts in a thread of its own: its list and our answer must be of the same moment.
	for {
		before := s.list()
		present := s.exists(keys...)
		if after := s.list(); len(after) != len(before) {
			continue
		}
		for i, key := range keys {
			if present.Get(i) != before[key] {
				t.Fatalf("%s: we say %v, the master's list %v", key, present.Get(i), before[key])
			}
		}
		if n := present.Count(); n == len(keys) || n == 0 {
			t.Fatalf("%d of %d objects are there: nothing was evicted, or all", n, len(keys))
		}
		return
	}
}

// list is what the master says that it has.
func (s *realStore) list() map[string]bool {
	s.t.Helper()
	res, err := http.Get("http://" + s.HTTP + "/get_all_keys")
	if err != nil {
		s.t.Fatal(err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		s.t.Fatalf("/get_all_keys: %s, %v", res.Status, err)
	}
	all := map[string]bool{}
	for lines := bufio.NewScanner(strings.NewReader(string(body))); lines.Scan(); {
		all[lines.Text()] = true
	}
	return all
}

// A master that starts again has lost everything and says nothing of it; the broken connection does, and what was
// remembered of it is dropped at once, however long it would have been good for.
func TestRealMooncakeRestart(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	config := hicache.Config{SGLang: &hicache.SGLang{Backend: "mooncake", PageSize: 4, TPSize: 2, PPSize: 1}}
	prompt, err := config.Prompt(harness.Tokens(1, 40), "", "", 4)
	if err != nil {
		t.Fatal(err)
	}
	lane := prompt.Lanes[0]
	objects := lane.Names(0, lane.Pages).Keys
	for remembered := false; !remembered; {
		for len(s.changed) > 0 {
			<-s.changed
		}
		s.Put(objects...)
		there := s.askAll(lane).Wait(s.ctx)
		s.Remove(objects...)
		after := s.askAll(lane).Wait(s.ctx)
		remembered = there.Err == nil && there.Present.Count() == 10 && after.Err == nil && after.Present.Count() == 10
		// else the master stood still and was taken for another, and all is done again
		if !remembered && len(s.changed) == 0 {
			t.Fatalf("%d of 10 pages, %v; remembered are %d, %v", there.Present.Count(), there.Err,
				after.Present.Count(), after.Err)
		}
	}
	s.KillMaster()
	for told := false; !told; {
		select {
		case why := <-s.changed:
			told = strings.Contains(why, "connection")
		case <-s.ctx.Done():
			t.Fatal("nobody was told that the connection broke")
		}
	}
	if f := s.askAll(lane).Wait(s.ctx); f.Err == nil || f.Known.Count() != 0 {
		t.Errorf("a dead master: %v, %d known", f.Err, f.Known.Count())
	}
	s.StartMaster()
	for { // Watch finds out that it is back
		f := s.askAll(lane).Wait(s.ctx)
		if f.Err == nil {
			if f.Known.Count() != 10 || f.Present.Count() != 0 {
				t.Errorf("a master that started again: %d known, %d present", f.Known.Count(), f.Present.Count())
			}
			return
		}
		if s.ctx.Err() != nil {
			t.Fatal(f.Err)
		}
	}
}

// The built-in master says what a real one says, word for word but for where an object lies.
func TestBuiltInMasterSpeaksAsARealOne(t *testing.T) {
	t.Parallel()
	s := startRealStore(t)
	built, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer built.Stop()
	keys := []string{"a", "b c", "d+e", "ü"}
	s.Put(keys...)
	built.Put(keys...)
	type reply struct {
		Status int
		Body   any
	}
	ask := func(addr, path string) (r reply) {
		res, err := http.Get("http://" + addr + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		r.Status = res.StatusCode
		if json.Unmarshal(body, &r.Body) != nil && res.StatusCode == http.StatusOK {
			lines := strings.Fields(string(body))
			slices.Sort(lines)
			r.Body = lines
		}
		if m, is := r.Body.(map[string]any); is {
			if data, is := m["data"].(map[string]any); is {
				for _, e := range data {
					if values, is := e.(map[string]any)["values"].([]any); is {
						for _, v := range values {
							for _, where := range []string{"buffer_address_", "transport_endpoint_"} {
								if _, has := v.(map[string]any)[where]; !has {
									t.Errorf("%s%s: a value without %s", addr, path, where)
								}
								delete(v.(map[string]any), where)
							}
						}
					}
				}
			}
		}
		return r
	}
	for _, path := range []string{
		"/health", "/get_all_keys", "/batch_query_keys", "/batch_query_keys?keys=", "/batch_query_keys?keys=a",
		"/batch_query_keys?keys=a,none", "/batch_query_keys?keys=a,",
		"/batch_query_keys?keys=b+c,d%2Be,d+e", "/batch_query_keys?keys=a%2Cnone", "/batch_query_keys?keys=a,a",
		"/batch_query_keys?keys=%C3%BC", "/batch_query_keys?keys=a,%ff%fe", "/nothing",
	} {
		real, ours := ask(s.HTTP, path), ask(built.Addr(), path)
		if real.Status != ours.Status || real.Status != http.StatusServiceUnavailable &&
			real.Status != http.StatusNotFound && !reflect.DeepEqual(real.Body, ours.Body) {
			t.Errorf("%s: a real master says\n%+v, the built-in one\n%+v", path, real, ours)
		}
	}
}
