package snapshot

import "errors"

// The errors of this package, named by what the caller does next. They come wrapped with the key or the chunk and with
// what is wrong.
var (
	// ErrCorrupt: the bytes are not what was written. Try the older generation. From every decoder.
	ErrCorrupt = errors.New("corrupt snapshot")

	// ErrVersion: whole, but written by a later build in a format that this one does not know. Try the older
	// generation. From every decoder.
	ErrVersion = errors.New("snapshot format from the future")

	// ErrMissing: the bucket has no such key. A [Fetch] returns it. Read the manifests again, as the generation may
	// have been replaced while it was being read; else try the older one.
	ErrMissing = errors.New("missing from the bucket")

	// ErrBehind: the generation in the bucket stands for a later place in the log than the one to be written. Do not
	// write. From [PlanWrite].
	ErrBehind = errors.New("the bucket holds a later snapshot")

	// ErrImage: the caller's image contradicts itself or exceeds a limit. A bug, or a limit to be raised; nothing that
	// was written before is harmed. From [NewWriter] and the Writer's methods.
	ErrImage = errors.New("image cannot be written")
)
