// Package fields reads the bodies of requests to engines, and classifies every field by its effect on a choice.
//
//	r, err := fields.Read(fields.Chat, body)
//	if len(r.Unsupported) > 0 {
//		// route by load, with a prompt of r.Length tokens
//	}
//
// [TableOf] returns the table of an API. Its classes are:
//
//	Tokens       determines the tokens of the prompt: the source of the model's tokens receives the field
//	Identity     determines the owner of the blocks: cache salt, adapter
//	Unsupported  determines tokens or identity, and nothing here reproduces its effect
//	Irrelevant   changes neither
//	Ignored      a field of OpenAI's API or of other engines that vLLM and SGLang do not read
//
// A request with an unsupported or unknown field must be routed by load, because a look-up could find the blocks of
// another prompt or tenant. [Request].Unsupported has the names of such fields. Unknown names come from clients, so
// [Request].Unsupported contains only short names of letters, digits and "_.-", and "other" for the rest.
//
// integration/judges/fields compares the tables with the request models in the newest wheels of vLLM and SGLang.
//
// # JSON as engines read it
//
// Engines read bodies with Python's json module. It accepts a byte order mark, UTF-16 and UTF-32, and the numbers NaN,
// Infinity and -Infinity. Names are case-sensitive.
package fields
