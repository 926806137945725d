package enginesim_test

import (
	"context"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// An engine serves two prompts with a common prefix.
func Example() {
	e, err := enginesim.Start(context.Background(), enginesim.Config{
		BlockSize: 4,
		Announced: func(a enginesim.Announced) {
			if a.Kind == events.Stored {
				fmt.Println("message", a.Seq, "stores", len(a.Blocks), "blocks with tokens", a.Tokens)
			}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer e.Stop()
	for _, prompt := range [][]uint32{{1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 9, 9, 9, 9}} {
		hit, err := e.Serve(prompt, nil)
		fmt.Println("hit", hit, err)
	}
	// Output:
	// message 0 stores 2 blocks with tokens [1 2 3 4 5 6 7 8]
	// hit 0 <nil>
	// message 1 stores 1 blocks with tokens [9 9 9 9]
	// hit 1 <nil>
}
