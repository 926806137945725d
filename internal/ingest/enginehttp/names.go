package enginehttp

import (
	"context"
	"fmt"
	"net/http"
	"slices"
)

// Names are the names that an engine accepts for its model in requests.
type Names struct {
	Model    string   // the engine's own name for its model; empty: not reported
	Aliases  []string // further ones, ascending
	Adapters []string // loaded LoRA adapters, ascending
}

// Names reads the names from /v1/models, a path of both engines. An engine without the path has no names. The error
// wraps ErrNotReady or ErrUnknown.
//
// A name with a parent is an adapter. Names of one model share a root, the model's path. A name with another root
// belongs to another model behind a proxy, and is left out.
func (a *Asker) Names(ctx context.Context) (n Names, err error) {
	var models struct {
		Data []struct {
			ID     string  `json:"id"`
			Root   string  `json:"root"`
			Parent *string `json:"parent"` // the model of an adapter
		} `json:"data"`
	}
	body, status, err := a.get(ctx, "/v1/models")
	switch {
	case err != nil:
		return n, err
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return n, fmt.Errorf("%w: /v1/models: %s", ErrUnknown, refusal(status))
	case status != http.StatusOK:
		return n, nil
	}
	if err := decode("/v1/models", body, &models); err != nil {
		return n, err
	}
	root, others := "", map[string]bool{} // names of other models
	for _, m := range models.Data {
		switch {
		case m.ID == "" || valueOf(m.Parent) != "":
		case n.Model == "":
			n.Model, root = m.ID, m.Root
		case m.Root != root:
			others[m.ID] = true
		default:
			n.Aliases = append(n.Aliases, m.ID)
		}
	}
	for _, m := range models.Data {
		if parent := valueOf(m.Parent); m.ID != "" && parent != "" && !others[parent] {
			n.Adapters = append(n.Adapters, m.ID)
		}
	}
	slices.Sort(n.Aliases)
	slices.Sort(n.Adapters)
	n.Aliases, n.Adapters = slices.Compact(n.Aliases), slices.Compact(n.Adapters)
	return n, nil
}
