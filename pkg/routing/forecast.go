package routing

// FirstToken returns the time in milliseconds until a candidate would answer the request with the first token: the
// terms queue, room, prefill and load of the policy kvatlas. Only depths of tiers count: Candidate.Overlap and
// Request.Shared have no effect. Request.BlockSize is above 0.
func FirstToken(r *Request, c *Candidate) float64 {
	v := View{Request: r}
	v.look(c)
	return v.queueTime(c) + roomTime(c) + v.outlook.prefill + v.loadTime()
}

// Waiting returns the time in milliseconds until a candidate begins the prefill of a request: the terms queue and room
// of the policy kvatlas.
func Waiting(c *Candidate) float64 {
	v := View{}
	v.outlook.perRate = 1 / rate(c)
	return v.queueTime(c) + roomTime(c)
}

// ComputeCosts appends to dst, for each candidate, the time in milliseconds that the prefill of a prompt there costs
// all requests: the terms prefill, decode, later and evict of the policy kvatlas. The delay of later requests depends
// on all candidates.
func ComputeCosts(dst []float64, r *Request, candidates []Candidate) []float64 {
	kept := make([]int, len(candidates))
	for i := range kept {
		kept[i] = i
	}
	v := View{Request: r, candidates: candidates, kept: kept}
	v.crowd = v.calculateCrowd()
	for i := range candidates {
		c := &candidates[i]
		v.look(c)
		dst = append(dst, v.outlook.prefill+v.decodeSlowdown(c)+v.laterDelay()+v.evictCost(c))
	}
	return dst
}
