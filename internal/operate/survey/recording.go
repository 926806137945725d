package survey

import (
	"cmp"
	"context"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// RecordingReport is the state of the recording of requests on all nodes, in the form of the JSON output.
type RecordingReport struct {
	On      bool                 `json:"on"` // on some node
	Nodes   []RecordingNode      `json:"nodes"`
	Stream  *api.RecordingStream `json:"stream,omitempty"` // of all nodes
	Records uint64               `json:"records"`
	Dropped uint64               `json:"dropped"`
}

// RecordingNode is the state of the recording on a node.
type RecordingNode struct {
	Node  string               `json:"node"`
	On    bool                 `json:"on"`
	Error string               `json:"error,omitempty"` // the node does not answer
	State *api.RecordingStatus `json:"state,omitempty"` // nil: off
}

// Recording requests the status of all nodes, and returns the state of the recording.
func Recording(ctx context.Context, c *client.Client) (*RecordingReport, error) {
	report, err := Nodes(ctx, c)
	if err != nil {
		return nil, err
	}
	s := &RecordingReport{Nodes: []RecordingNode{}}
	for _, n := range report.Nodes {
		node := RecordingNode{Node: n.Node, Error: n.Error}
		if n.Status != nil && n.Status.Recording != nil {
			node.On, node.State = true, n.Status.Recording
			s.On, s.Stream = true, cmp.Or(s.Stream, node.State.Stream)
			s.Records, s.Dropped = s.Records+node.State.Records, s.Dropped+node.State.Dropped
		}
		s.Nodes = append(s.Nodes, node)
	}
	return s, nil
}
