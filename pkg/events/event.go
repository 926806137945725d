package events

// Kind is the kind of change that an event announces. A wire constant: do not renumber.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = 1 // consecutive blocks were stored in a tier
	Removed Kind = 2 // one copy of each block left a tier
	Cleared Kind = 3 // one tier or all tiers became empty
)

var kindNames = [...]string{"none", "stored", "removed", "cleared"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// Reason is the reason for a clear. A wire constant: do not renumber.
type Reason uint8

// The reasons for a clear.
const (
	ReasonEngine      Reason = 1 // the engine announced it
	ReasonGap         Reason = 2 // engine events are missing, and the engine could not replay them
	ReasonRestart     Reason = 3 // the engine restarted
	ReasonLeaseExpiry Reason = 4 // the worker's lease expired
	_                 Reason = 5 // reserved, "overflow": no program writes it
	ReasonOperator    Reason = 6 // an operator requested it
	ReasonEngineGone  Reason = 7 // the engine's process ended
)

var reasonNames = [...]string{"none", "engine", "gap", "restart", "lease_expired", "overflow", "operator",
	"engine_gone"}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return "unknown"
}

// MaxBlocksPerEvent bounds the blocks of one event. A decoder cuts a longer sequence of blocks into consecutive events,
// always at multiples of this number. Therefore the same engine message always results in the same events.
const MaxBlocksPerEvent = 4096

// MaxRanks bounds the ranks of one worker, which are numbered 0 to MaxRanks-1. Events and registrations of higher ranks
// are skipped, so a worker's key cannot fill the nodes' memory.
const MaxRanks = 4096

// Event is a change of the blocks on a rank.
//
// The blocks of a stored event are consecutive. The first block follows Parent, or starts a prompt if HasParent is
// false. A stored event without Locals announces a copy in Tier of blocks that the rank announced before, in any tier.
// A stored event without Blocks announces only the kind of its group.
//
// A stored event with Chunk announces copies below the device in chunks of several blocks; the engine loads whole
// chunks. The name of a chunk is the name of the last block. With Own, the name may be the connector's own, which the
// device never announces. Locals are then the plain hashes of the chunk's blocks, by which an index finds the place.
// Parent is then the name of the chunk before, or 0 if the connector announces no parent.
type Event struct {
	Kind      Kind
	Tier      Tier // of a cleared event: AllTiers, or the cleared tier
	Group     GroupIndex
	Attention Attention // of a stored event; removed events have none, since the index remembers the group's kind
	HasParent bool
	Reason    Reason // of a cleared event
	// of a stored event: the engine recomputes the last found block of the group (EAGLE); see [GroupSpec]
	Drops bool
	// of a stored event with Locals: the number of tokens after a block in the block's hash; see
	// [NewLookaheadHasher]
	Lookahead uint32
	// of a stored event, in tokens: the window of a sliding group, the chunk of a chunked one; 0: not announced. Of a
	// main group: not 0 if the engine does not announce the blocks of the rank's other groups
	Window uint32
	// of a stored event below the device: the number of blocks that the engine loads together; 0: not announced;
	// ChunkSizeUnknown: the names are of chunks of unknown size
	Chunk uint32
	// of a stored event with Locals: the session of the request that stored the blocks; 0: not announced. Other
	// sessions may share the blocks
	Session SessionHash
	Own     bool        // of a stored event with Chunk: its only name may be the connector's own
	Parent  BlockHash   // meaningful if HasParent
	Blocks  []BlockHash // stored, removed
	Locals  []LocalHash // stored: a hash for each block, or none; with Own, a hash for each block of the chunk
}

// Places reports whether the event determines the places of its blocks, by the parent and the local hashes.
func (e *Event) Places() bool { return len(e.Locals) > 0 && !e.Own }

// ChunkSizeUnknown is the Chunk of an event with chunks of unknown size.
const ChunkSizeUnknown = 1<<32 - 1

// Batch is the unit of the log: consecutive events of one (worker, rank, incarnation) in one message. NVIDIA Dynamo's
// term is KvCacheEvents.
type Batch struct {
	Incarnation Incarnation
	FirstID     EventID // the id of Events[0]; later events count up from it. Without events: the next id

	// Model and BlockSize (in tokens) describe the rank, and are constant within an incarnation.
	Model     string
	BlockSize uint32

	// Cursor is the shim's position in the engine's own stream after this batch.
	Cursor Cursor

	// Shutdown marks the end of the incarnation: the engine ended, or its lease expired. The rank then holds no blocks.
	Shutdown bool

	Events []Event

	hashes []uint64 // DecodeBatch stores the events' Blocks and Locals here
}

// Cursor is a position in an engine's own stream of messages. With it, a restarted shim requests the messages since
// then, and detects whether the engine process is still the same.
type Cursor struct {
	Known  bool      // false: no message of the engine's stream has been published completely
	Seq    EngineSeq // the last engine message that was published completely
	Digest uint64    // XXH3-64 of the payload of message Seq

	Partial uint32 // the number of events of the message after Seq that were published too (a message may be split)
}

// LastID returns the id of the last event up to and including this batch.
func (b *Batch) LastID() EventID { return b.FirstID + EventID(len(b.Events)) - 1 }
