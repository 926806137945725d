package selection

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestNotBooked checks the codes of failed calls. A call that waits for the booking of an unknown id ends with the
// context: the caller has gone, the node stops, or the deadline has passed. None of these is an internal error.
func TestNotBooked(t *testing.T) {
	for err, want := range map[error]api.Code{
		load.ErrConflict: api.CodeConflict, load.ErrUnknown: api.CodeUnknownRequest, load.ErrFull: api.CodeBusy,
		load.ErrInvalid: api.CodeMalformed, context.Canceled: api.CodeUnavailable, context.DeadlineExceeded: api.CodeBehind,
		api.Errorf(api.CodeNotReady, "starting"): api.CodeNotReady, errors.New("a fault"): api.CodeInternal,
	} {
		for _, e := range []error{err, fmt.Errorf("book: %w", err)} {
			if got := notBooked(e); !api.HasCode(got, want) {
				t.Errorf("%v: %v, want the code %s", e, got, want)
			}
		}
	}
	if err := notBooked(nil); err != nil {
		t.Error(err)
	}
}
