package routing

// Estimates appends to dst what the request would find and cost at each candidate, whatever the policy, and whether the
// candidate may be chosen or not.
func (s *Selector) Estimates(dst []Estimate, r *Request, candidates []Candidate, scratch *Scratch) []Estimate {
	v := scratch.begin(r, s.config.With(&r.Overrides), candidates)
	v.prefill = s.policy.Prefill
	defer scratch.end()
	for i := range candidates {
		dst = append(dst, v.Estimate(&candidates[i]))
	}
	return dst
}
