package kvindexer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/faces/kvindexer/kvindexerpb"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// rank returns a rank of a worker, at an address.
func rank(worker string, n events.Rank, blockSize uint32, address string) registry.PoolRank {
	return registry.PoolRank{RankKey: events.RankKey{Instance: events.WorkerID(worker), Rank: n}, BlockSize: blockSize,
		Record: &api.WorkerRecord{WorkerSpec: api.WorkerSpec{Endpoint: address}}}
}

// TestMatch queries two models, one of them with two block sizes. The deeper of two ranks at one address counts. Ranks
// without an address or a registration are left out. Ranks of an older node count with the reported depth.
func TestMatch(t *testing.T) {
	pools := []*registry.Pool{
		{Model: "m", Ranks: []registry.PoolRank{rank("a", 0, 16, "http://a"), rank("a", 1, 16, "http://a"),
			rank("b", 0, 16, ""), rank("c", 0, 64, "http://c:1"), rank("d", 0, 16, "http://d")}},
		{Model: "n", Ranks: []registry.PoolRank{rank("e", 0, 16, "http://e"), rank("f", 0, 16, "http://b")}},
		{Model: "nowhere", Ranks: []registry.PoolRank{rank("g", 0, 16, "")}},
	}
	answers := map[string][]api.Overlap{
		"m 16": {{Instance: "a", Device: 1, Within: []uint32{3}}, {Instance: "a", Rank: 1, Device: 1, Within: []uint32{5}},
			{Instance: "b", Within: []uint32{9}}, {Instance: "d", Disk: 4}, {Instance: "x", Within: []uint32{9}}},
		"m 64": {{Instance: "c", Device: 4, Host: 3, Disk: 2}},
		"n 16": {{Instance: "e", Within: []uint32{5}}, {Instance: "f", Within: []uint32{7}}},
	}
	s := New(Config{Pools: func() []*registry.Pool { return pools },
		Find: func(_ context.Context, q *api.Query) (*api.Answer, error) {
			if err := q.Check(); err != nil {
				return nil, err
			}
			if len(q.EngineHashes) != 3 || q.EngineHashes[1] != 1<<64-2 {
				return nil, fmt.Errorf("the hashes are %v", q.EngineHashes)
			}
			return &api.Answer{Workers: answers[fmt.Sprint(q.Model, " ", q.BlockSize)]}, nil
		}})
	a, err := s.MatchExternalKvPrefix(t.Context(), &kvindexerpb.MatchExternalKvPrefixRequest{Hashes: []int64{1, -2, 3, 4},
		MaxBlocks: 3})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range a.Matches {
		got = append(got, fmt.Sprint(m.WorkerAddress, " ", m.WorkerId, " ", m.MatchedPrefixBlocks))
	}
	want := []string{"http://b f 7", "http://c:1 c 7", "http://a a 5", "http://e e 5"}
	if !slices.Equal(got, want) || a.BestPrefixBlocks != 7 || a.BlocksRead != 3 {
		t.Errorf("%q %+v, want %q", got, a, want)
	}
	a, err = s.MatchExternalKvPrefix(t.Context(), &kvindexerpb.MatchExternalKvPrefixRequest{})
	if err != nil || len(a.Matches) > 0 || a.BestPrefixBlocks != 0 || a.BlocksRead != 0 {
		t.Errorf("a request without hashes: %+v, %v", a, err)
	}
}

// TestRefusals: the errors that a router receives.
func TestRefusals(t *testing.T) {
	ask := func(ctx context.Context, said error, hashes int) error {
		s := New(Config{Pools: func() []*registry.Pool {
			return []*registry.Pool{{Model: "m", Ranks: []registry.PoolRank{rank("a", 0, 16, "http://a")}}}
		}, Find: func(context.Context, *api.Query) (*api.Answer, error) { return nil, said }})
		_, err := s.MatchExternalKvPrefix(ctx, &kvindexerpb.MatchExternalKvPrefixRequest{Hashes: make([]int64, hashes)})
		return err
	}
	for said, want := range map[api.Code]api.Code{
		api.CodeUnknownModel: "", api.CodeNotReady: api.CodeUnavailable, api.CodeInternal: api.CodeUnavailable,
		api.CodeBlockSizeMismatch: "", api.CodeBusy: api.CodeBusy, api.CodeTooLarge: api.CodeTooLarge,
	} {
		err := ask(t.Context(), api.Errorf(said, "why"), 1)
		var e *api.Error
		if want == "" {
			if err != nil {
				t.Errorf("%s: %v", said, err)
			}
		} else if !errors.As(err, &e) || e.Code != want || !strings.Contains(e.Message, "why") {
			t.Errorf("%s: %v, want %s", said, err, want)
		}
	}
	if err := ask(t.Context(), context.DeadlineExceeded, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	two := New(Config{Pools: func() []*registry.Pool {
		return []*registry.Pool{{Model: "m", Ranks: []registry.PoolRank{rank("a", 0, 16, "http://a")}},
			{Model: "n", Ranks: []registry.PoolRank{rank("b", 0, 16, "http://b")}}}
	}, Find: func(_ context.Context, q *api.Query) (*api.Answer, error) {
		if q.Model == "m" {
			return nil, api.Errorf(api.CodeNotReady, "why")
		}
		return &api.Answer{Workers: []api.Overlap{{Instance: "b", Device: 1}}}, nil
	}})
	a, err := two.MatchExternalKvPrefix(t.Context(), &kvindexerpb.MatchExternalKvPrefixRequest{Hashes: []int64{1}})
	if err != nil || len(a.Matches) != 1 {
		t.Errorf("one model of two is ready: %+v, %v", a, err)
	}
	if err := ask(t.Context(), nil, api.MaxTokens+1); status.Code(err) != codes.OutOfRange {
		t.Error(err)
	}
}
