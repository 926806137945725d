package gateway

import (
	mathrand "math/rand/v2"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/internal/text/fields"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// bootstrapped returns the body of a request with SGLang's fields for a prefill worker. It returns nil for another
// prefill worker, and without one. prompts is [fields.Request].Prompts.
func (s *Service) bootstrapped(c *Choice, prefill *api.Selection, body []byte, prompts int) []byte {
	if prefill == nil {
		return nil
	}
	pool := s.cfg.Pool(prefill.Model)
	at := pool.Rank(events.RankKey{Instance: prefill.Worker, Rank: prefill.Rank})
	if at == nil || at.Record.BootstrapPort == 0 {
		return nil
	}
	rank, ranks := serverRank(pool.Worker(prefill.Worker), prefill.Rank, c.Prefiller)
	return fields.Replace(body, bootstrap(c.Prefiller, at.Record.BootstrapPort, rank, ranks, prompts))
}

// bootstrap returns the fields by which SGLang's decode worker meets its prefill worker, in the form of SGLang's router
// (sgl-project/sglang › sgl-model-gateway/src/routers/http/pd_types.rs): values, or lists with a value for each prompt
// of a list. at is the prefill worker's address. SGLang computes the data-parallel rank as the room's remainder by the
// number of ranks (load_balance_method follow_bootstrap_room), so each room has the remainder of the chosen rank.
func bootstrap(at string, port uint32, rank events.Rank, ranks, prompts int) []fields.Member {
	host := netip.MustParseAddrPort(at).Addr().String()
	list := func(value func() string) string {
		if prompts == 0 {
			return value()
		}
		values := make([]string, prompts)
		for i := range values {
			values[i] = value()
		}
		return "[" + strings.Join(values, ",") + "]"
	}
	return []fields.Member{
		{Name: "bootstrap_host", Value: list(func() string { return strconv.Quote(host) })},
		{Name: "bootstrap_port", Value: list(func() string { return strconv.FormatUint(uint64(port), 10) })},
		{Name: "bootstrap_room", Value: list(func() string {
			room := mathrand.Uint64() >> 2 // SGLang's rooms are below 2^63
			n := uint64(max(ranks, 1))
			return strconv.FormatUint(room-room%n+uint64(rank), 10)
		})},
	}
}
