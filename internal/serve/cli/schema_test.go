package cli

import (
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

type embedded struct {
	Inner bool `json:"inner"`
}

type tree struct {
	Name     string             `json:"name"`
	At       time.Time          `json:"at,omitzero"`
	Children []*tree            `json:"children,omitempty"`
	Status   *api.Status        `json:"status"`
	Target   routing.Target     `json:"target"`
	Counts   map[string]float64 `json:"counts"`
	Bytes    []byte             `json:"bytes"`
	Any      any                `json:"any"`
	Plain    uint8
	hidden   int
	Omitted  int `json:"-"`
	embedded
}

// TestOutput: the recorded form of an output has the names and types of encoding/json.
func TestOutput(t *testing.T) {
	const want = "[{name: string, at?: time, children?: [value], status: Status, target: RoutingTarget, " +
		"counts: {*: number}, bytes: string, any: value, Plain: number, inner: bool}]"
	cmd := Output[[]tree](&cobra.Command{})
	if got := cmd.Annotations[jsonSchema]; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	_ = tree{}.hidden
}
