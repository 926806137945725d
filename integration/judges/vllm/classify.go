package vllm

// class says how an engine's answer stands to what was predicted. docs/engines/vllm.md names all but the last.
type class string

const (
	equal          class = "equal"
	promptLogprobs class = "prompt_logprobs" // the engine reads no cache for such a request
	sibling        class = "n=2"             // the engine tells what the last child reused, also of its sibling's
	concurrent     class = "concurrent"      // another request changed the cache between the question and the look-up
	resetHeldBack  class = "reset"           // a cleared cache is announced with the engine's next step
	unexplained    class = "unexplained"
)

// classes are all of them, in the order of the table.
var classes = []class{equal, promptLogprobs, sibling, concurrent, resetHeldBack, unexplained}

// circumstances are those under which a request was made.
type circumstances int

const (
	alone      circumstances = iota // everything that the engine had announced was known, and nothing else ran
	among                           // other requests ran at the same time
	afterReset                      // alone, after the cache was reset, with no step since
)

// observation is one request, what was predicted of it, and what the engine said.
type observation struct {
	request request
	under   circumstances

	predicted int // blocks, by kvatlas
	reused    int // blocks, by the engine

	// What the engine announced between the question and some time after the reply, by the twin.
	from, to int // versions
	messages []message
}

// classify says to which class an observation belongs. The twin must have been told everything up to o.to.
func classify(t *twin, o *observation) class {
	asked := o.request.prompt.reusable()
	switch {
	case o.predicted == o.reused:
		return equal
	case o.request.promptLogprobs && o.reused == 0:
		return promptLogprobs
	case o.request.n > 1 && o.reused > o.predicted && t.everUsable(asked, o.from, o.to, o.reused):
		return sibling
	case o.under == afterReset && o.reused == 0 && len(o.messages) > 0 && o.messages[0].cleared:
		return resetHeldBack
	case o.under == among && t.everUsable(asked, o.from, o.to, o.reused):
		return concurrent
	default:
		return unexplained
	}
}
