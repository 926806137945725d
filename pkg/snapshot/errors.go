package snapshot

import "errors"

// Errors of this package, by the reaction of the caller. The functions wrap them with the key or chunk and the cause.
var (
	// ErrCorrupt: the bytes differ from the written bytes. Try the older generation. All decoders return it.
	ErrCorrupt = errors.New("corrupt snapshot")

	// ErrVersion: the bytes are intact and have the format of a later build. Try the older generation. All decoders
	// return it.
	ErrVersion = errors.New("snapshot format from the future")

	// ErrMissing: the bucket does not have the key. A [Fetch] returns it. Read the manifests again, because a writer
	// may have replaced the generation meanwhile. If not, try the older generation.
	ErrMissing = errors.New("missing from the bucket")

	// ErrBehind: the bucket has a generation for a later position in the log. Do not write. [PlanWrite] returns it.
	ErrBehind = errors.New("the bucket holds a later snapshot")

	// ErrImage: the caller's image is inconsistent or exceeds a limit. The cause is a bug, or a limit that is too low.
	// Earlier snapshots stay intact. [NewWriter] and the Writer's methods return it.
	ErrImage = errors.New("image cannot be written")
)
