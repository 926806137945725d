package events

// Kind is what an event says. A wire constant: do not renumber.
type Kind uint8

// The kinds of events.
const (
	Stored  Kind = 1 // blocks were stored in a tier, each following the one before
	Removed Kind = 2 // one copy of each block left a tier
	Cleared Kind = 3 // a tier, or all of them, is empty now
)

var kindNames = [...]string{"none", "stored", "removed", "cleared"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// Reason says why a rank was cleared. A wire constant: do not renumber.
type Reason uint8

// The reasons for a clear.
const (
	ReasonEngine      Reason = 1 // the engine said so
	ReasonGap         Reason = 2 // engine events are missing and could not be replayed
	ReasonRestart     Reason = 3 // a new life of the engine
	ReasonLeaseExpiry Reason = 4 // the worker is gone
	ReasonOverflow    Reason = 5 // the shim's queue was full for too long
	ReasonOperator    Reason = 6 // someone asked for it
	ReasonEngineGone  Reason = 7 // the engine's process has ended; its memory went with it
)

var reasonNames = [...]string{"none", "engine", "gap", "restart", "lease_expired", "overflow", "operator",
	"engine_gone"}

func (r Reason) String() string {
	if int(r) < len(reasonNames) {
		return reasonNames[r]
	}
	return "unknown"
}

// MaxBlocksPerEvent bounds one event. A decoder cuts a longer run of blocks into events that follow each other, always
// at multiples of this number, so that the same engine message gives the same events in every life of a shim.
const MaxBlocksPerEvent = 4096

// MaxRanks bounds the ranks of one worker: they are numbered 0 to MaxRanks-1. Events and registrations of other ranks
// are skipped, so that one worker's key cannot fill the memory of nodes.
const MaxRanks = 4096

// Event is one change of what one rank holds.
//
// A stored event's blocks follow each other: the first follows Parent (or starts a prompt, if HasParent is false). A
// stored event without Locals has no tokens to hash: it says that blocks which the rank announced before, in whatever
// tier, now have a copy in Tier too. One without Blocks says nothing but what its group serves.
//
// A stored event with Chunk is of copies below the device that the engine loads in chunks of several blocks. A name of
// such an event stands for its chunk and is the name of the chunk's last block. With Own the name may be the
// connector's own, which the device never announces: Locals are then the plain hashes of the chunk's blocks, by which
// an index finds the place, and Parent is the name of the chunk before, or 0 if the connector does not tell it.
type Event struct {
	Kind      Kind
	Tier      Tier // of a cleared event: AllTiers, or the one that was cleared
	Group     GroupIndex
	Attention Attention // of a stored event; a removed event has none and the group's is remembered
	HasParent bool
	Reason    Reason // of a cleared event
	// of a stored event: the engine computes the last block that its group finds anew (EAGLE); see [GroupSpec]
	Drops bool
	// of a stored event with Locals: how many tokens beyond its own each block's hash covers; see [NewLookaheadHasher]
	Lookahead uint32
	// of a stored event, in tokens: the window of a sliding group, the chunk of a chunked one; 0: not said. Of a main
	// group: not 0 if the rank has others that its engine announces nothing of
	Window uint32
	// of a stored event below the device: how many blocks the engine loads together; 0: not said; ChunkUnsaid: the event
	// names chunks and does not tell how many blocks they have
	Chunk  uint32
	Own    bool        // of a stored event with Chunk: its only name may be the connector's own
	Parent BlockHash   // meaningful if HasParent
	Blocks []BlockHash // stored, removed
	Locals []LocalHash // stored: one for each of Blocks, or none at all; with Own, one for each block of the chunk
}

// Places reports whether the event tells the places of its blocks: by the parent and the local hashes.
func (e *Event) Places() bool { return len(e.Locals) > 0 && !e.Own }

// ChunkUnsaid is the Chunk of an event that names a chunk's last block and does not tell how many blocks it has.
const ChunkUnsaid = 1<<32 - 1

// Batch is the unit of the log: consecutive events of one (worker, rank, incarnation) in one message. NVIDIA Dynamo
// calls such a thing KvCacheEvents.
type Batch struct {
	Incarnation Incarnation
	FirstID     EventID // id of Events[0]; the others count up from it. Without events: the id that comes next

	// Model and BlockSize (in tokens) say what the rank serves; they do not change within an incarnation.
	Model     string
	BlockSize uint32

	// Cursor is how far the shim had come in the engine's own stream when this batch was complete.
	Cursor Cursor

	// Shutdown says that nothing follows in this incarnation: the engine has ended, or its lease has expired. The rank
	// holds nothing then.
	Shutdown bool

	Events []Event

	hashes []uint64 // what the events' Blocks and Locals lie in, if DecodeBatch read them
}

// Cursor is a place in an engine's own stream of messages. It lets a shim that starts again ask the engine for what
// came since, and find out whether it is still the same engine process.
type Cursor struct {
	Known  bool      // false: nothing of the engine's stream has been published whole
	Seq    EngineSeq // the last engine message that is published whole
	Digest uint64    // XXH3-64 of that message's payload, as the engine sent it

	Partial uint32 // how many events of the message after Seq are published too (a message may be split).
}

// LastID is the id of the last event up to and including this batch.
func (b *Batch) LastID() EventID { return b.FirstID + EventID(len(b.Events)) - 1 }
