package vllm

// class is the relation of an engine's answer to the prediction. docs/engines/vllm.md describes all but the last class.
type class string

const (
	equal          class = "equal"
	promptLogprobs class = "prompt_logprobs" // the engine does not use the cache for such a request
	// the engine reports the reuse of the last child, including blocks of its siblings
	sibling       class = "n=2"
	concurrent    class = "concurrent" // another request changed the cache between the question and the look-up
	resetHeldBack class = "reset"      // a cleared cache is announced with the engine's next step
	unexplained   class = "unexplained"
)

// classes lists all classes in the order of the table.
var classes = []class{equal, promptLogprobs, sibling, concurrent, resetHeldBack, unexplained}

// circumstances are the circumstances of a request.
type circumstances int

const (
	alone      circumstances = iota // kvatlas had all announced events, and no other request ran
	among                           // other requests ran at the same time
	afterReset                      // alone, after the cache was reset, with no step since
)

// observation is a request with the prediction and the engine's answer.
type observation struct {
	request request
	under   circumstances

	predicted int // blocks, by kvatlas
	reused    int // blocks, by the engine

	// The events between the query and some time after the reply, from the twin.
	from, to int // versions
	messages []message
}

// classify returns the class of an observation. The twin must have all messages up to o.to.
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
