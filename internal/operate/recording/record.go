package recording

import (
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Flags of a request.
type Flags uint64

// The flags. The values are part of the format.
const (
	Booked        Flags = 1 << iota // booked by the choice; otherwise the router may book it later
	Refused                         // no worker was chosen
	_                               // reserved
	Incomplete                      // the answer of the index lacked partitions
	Pinned                          // the request named its worker, or its candidates
	Disaggregated                   // a prefill worker computes the prompt
	Ended                           // of a joined request: its end is known
	Reported                        // of a joined request: the engine has reported the reuse
	Answered                        // of a joined request: the engine has reported the tokens of the answer
)

// Place is a rank of a worker with the state on which the choice was based.
type Place struct {
	Worker string
	Rank   uint32

	// Depths of the prompt, in blocks: on the device, in host memory, on disk or in an external store, and in the shared
	// store. Guessed is the part of Device without confirmation.
	Device, Host, Disk, Shared, Guessed uint32

	// The booked load before the choice.
	Requests, PrefillTokens, Blocks uint64
}

// Request is a routed request with its choice.
type Request struct {
	Time int64 // of its arrival, milliseconds since 1970
	Link Name  // of its id; 0: none

	Model        string
	BlockSize    uint32 // tokens
	EngineHashes bool   // the prompt was given by engine hashes: its names match no names by tokens
	Span         uint32 // tokens of a name
	Tokens       uint64 // of the prompt
	Output       uint64 // expected tokens of the answer; 0: unknown
	Names        []Name // of the prompt; see the package comment

	Session, Adapter Name // 0: none

	Flags
	Policy     string
	Candidates uint32

	// Place is the chosen rank. Prefill is the rank that computes the prompt of a Disaggregated request.
	Place, Prefill Place

	Cached, Computed uint64 // tokens: the estimated reuse, and the tokens to compute, with weights by the policy
}

// End is the end of a booked request.
type End struct {
	Time       int64
	Link       Name
	Freed      bool   // ended by the router, not by its age or with its worker
	Life       uint64 // milliseconds from the booking to the end; 0: unknown
	FirstToken uint64 // milliseconds from the booking to the first output token; 0: unknown
	Blocks     uint64 // reported blocks of output
}

// Report is the reuse of a prompt that the engine has reported.
type Report struct {
	Time   int64
	Link   Name
	Cached uint64 // tokens of the prompt
}

// Answer has the tokens of a complete answer, as the engine has reported them to a gateway.
type Answer struct {
	Time   int64
	Link   Name
	Tokens uint64
}

// Observed is a request as the node has it. The recorder converts it to a [Request].
type Observed struct {
	Request                                 // without names and Span
	ID, SessionID, AdapterName, Salt string // converted to names
	Sequence                         []events.SeqHash
}
