package routing

// Estimates appends to dst an estimate for each candidate, also for candidates that Choose would drop.
func (s *Selector) Estimates(dst []Estimate, r *Request, candidates []Candidate, scratch *Scratch) []Estimate {
	v := scratch.begin(r, s.config.With(&r.Overrides), candidates)
	v.prefill = s.policy.Prefill
	defer scratch.end()
	for i := range candidates {
		dst = append(dst, v.Estimate(&candidates[i]))
	}
	return dst
}
