package doctor

import "github.com/kvatlas/kvatlas/pkg/api"

// judgeSource reports a source of many ranks, or of a shared store, without events for the shim.
func judgeSource(q *api.QuietSource) Finding {
	f := finding(Warning, sourceSilent, q.String(), "the source has published no event since its shim began",
		"connected, and silent", q.Advice)
	if q.Failure != "" {
		f.ID, f.Evidence = sourceUnreachable, q.Failure
		f.What = "the source is unreachable: nodes poll the store instead"
	}
	if q.Severe() {
		f.Severity, f.What = Error, "the source is unreachable: changes of its workers do not arrive"
	}
	return f
}
