package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestTreesAreShared checks that a recent tree is reused, that a slow tree is kept longer, and that an error is not
// kept.
func TestTreesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTrees()
		made, cost := 0, time.Duration(0)
		get := func(model string, failure error) error {
			make := func(*api.PrefixesRequest) (*api.PrefixTree, time.Duration, error) {
				made++
				time.Sleep(cost)
				return &api.PrefixTree{}, cost, failure
			}
			_, err := list.get(t.Context(), &api.PrefixesRequest{Model: model}, make)
			return err
		}
		for _, c := range []struct {
			model string
			cost  time.Duration
			after time.Duration
			made  int
		}{{"a", 0, 0, 1}, {"a", 0, time.Second, 1}, {"b", 0, 0, 2}, {"a", 100 * time.Millisecond, 2 * time.Second, 3},
			{"a", 0, 3900 * time.Millisecond, 3}, {"a", 0, 200 * time.Millisecond, 4}} {
			time.Sleep(c.after)
			cost = c.cost
			if err := get(c.model, nil); err != nil || made != c.made {
				t.Errorf("%+v: %d were made, %v", c, made, err)
			}
		}
		for range 2 {
			if get("c", errors.New("not now")) == nil {
				t.Error("the error is lost")
			}
		}
		if made != 6 {
			t.Errorf("%d were made: an error is kept", made)
		}
	})
}

// TestATreeIsNotWaitedForWithoutEnd checks that the end of the context ends the wait for another request's tree.
func TestATreeIsNotWaitedForWithoutEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := newTrees()
		release, ended := make(chan struct{}), make(chan error, 1)
		tree := func(*api.PrefixesRequest) (*api.PrefixTree, time.Duration, error) {
			<-release
			return &api.PrefixTree{}, 0, nil
		}
		get := func(ctx context.Context) {
			_, err := list.get(ctx, &api.PrefixesRequest{Model: "m"}, tree)
			ended <- err
		}
		go get(t.Context())
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		go get(ctx)
		time.Sleep(2 * time.Second) // of the bubble's clock
		if len(ended) == 0 {
			t.Error("get waits after the end of the context")
		} else if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		close(release)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestGather checks that a part is requested from a single node. After a failure another node is queried. Partitions
// without a part are missing, with the names of the nodes without an answer.
func TestGather(t *testing.T) {
	var mu sync.Mutex
	asked := map[string][]string{}
	g := gathering{model: "m", asked: make([][]string, 4),
		serving: func(p events.Partition) []string {
			return [][]string{{"a", "b"}, {"b", "c"}, {"c", "a"}, {"dead"}}[p]
		},
		ask: func(name string, share []events.Partition) (*api.PrefixTree, error) {
			mu.Lock()
			defer mu.Unlock()
			asked[name] = append(asked[name], fmt.Sprint(share))
			switch name {
			case "b", "dead":
				return nil, errors.New("not now")
			case "c": // the node no longer serves 2, and has no worker of the model in 1
				if share[0] == 2 {
					return &api.PrefixTree{Missing: share}, nil
				}
				return &api.PrefixTree{Complete: true}, nil
			}
			return &api.PrefixTree{Complete: true, BlockSize: 16}, nil
		}}
	if err := g.gather(); err != nil || g.size != 16 {
		t.Fatal(g.size, err)
	}
	if got := fmt.Sprint(asked); got != "map[a:[[0] [2]] b:[[1]] c:[[2] [1]] dead:[[3]]]" {
		t.Error(got)
	}
	if got := fmt.Sprint(g.open, g.unheard()); got != "[3] [dead]" {
		t.Error(got)
	}
	g = gathering{model: "m", size: 32, asked: make([][]string, 1), serving: func(events.Partition) []string {
		return []string{"a"}
	}, ask: func(string, []events.Partition) (*api.PrefixTree, error) {
		return &api.PrefixTree{Complete: true, BlockSize: 16}, nil
	}}
	if err := g.gather(); api.AsError(err).Code != api.CodeBlockSizeMismatch {
		t.Error(err)
	}
}
