package tenants

// Use contains the sums of a tenant's requests. The sums of all tenants are the sums of the funnel.
type Use struct {
	Requests, Routed, Reported uint64 // requests; with a choice; with a report of the engine
	Requested                  uint64 // tokens of all prompts
	Selected                   uint64 // of the prefixes that the chosen workers held
	Confirmed                  uint64 // part of Selected: of choices with a report
	Reused                     uint64 // by the reports, part of Confirmed
	Unserved                   uint64 // tokens of requests without a chosen worker

	// The effects of a quota. Rejected requests are not in the other sums.
	Rejected, RejectedTokens, Lowered uint64
}

// Add adds other sums.
func (u *Use) Add(o *Use) {
	u.Requests, u.Routed, u.Reported = u.Requests+o.Requests, u.Routed+o.Routed, u.Reported+o.Reported
	u.Requested, u.Selected, u.Confirmed = u.Requested+o.Requested, u.Selected+o.Selected, u.Confirmed+o.Confirmed
	u.Reused, u.Unserved = u.Reused+o.Reused, u.Unserved+o.Unserved
	u.Rejected, u.RejectedTokens, u.Lowered = u.Rejected+o.Rejected, u.RejectedTokens+o.RejectedTokens, u.Lowered+o.Lowered
}

// Expected returns the tokens that choices expected to be reused, without a report of the engine so far.
func (u *Use) Expected() uint64 { return u.Selected - u.Confirmed }

// Computed returns the tokens of served prompts without the reused and the expected ones.
func (u *Use) Computed() uint64 { return u.Requested - u.Unserved - u.Expected() - u.Reused }
