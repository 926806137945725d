package server

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestTreesAreShared: a tree that was made a moment ago is not made again; one that took long lasts longer, and an
// error is not kept.
func TestTreesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var list trees
		made, cost := 0, time.Duration(0)
		get := func(model string, failure error) error {
			_, err := list.get(api.PrefixesRequest{Model: model}, func(*api.PrefixesRequest) (*api.PrefixTree, error) {
				made++
				time.Sleep(cost)
				return &api.PrefixTree{}, failure
			})
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
