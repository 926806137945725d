package routing

// FirstToken returns the time in milliseconds until a candidate would answer the request with the first token: the
// terms queue, room, prefill and load of the policy kvatlas. Only depths of tiers count: Candidate.Overlap and
// Request.Shared have no effect. Request.BlockSize is above 0.
func FirstToken(r *Request, c *Candidate) float64 {
	v := View{Request: r}
	v.setOutlook(c)
	return v.queueTime(c) + roomTime(c) + v.outlook.prefill + v.loadTime()
}

// Forecast repeats FirstToken for a candidate with guessed depths. It computes the terms queue and room once. A
// Forecast is for one goroutine.
type Forecast struct {
	view  View
	trial Candidate
	tiers [4]uint32 // Device, Host, Disk and WouldLoad without a guess
	wait  float64
}

// Set sets the request and the candidate. It copies the candidate.
func (f *Forecast) Set(r *Request, c *Candidate) {
	f.view.Request, f.trial = r, *c
	f.tiers = [...]uint32{c.Device, c.Host, c.Disk, c.WouldLoad}
	f.view.setRate(c)
	f.wait = f.view.queueTime(c) + roomTime(c)
}

// Guess returns FirstToken after [Candidate.Guess]. The depth must be greater than Device of the candidate.
func (f *Forecast) Guess(depth uint32) float64 {
	c := &f.trial
	c.Device, c.Host, c.Disk, c.WouldLoad = f.tiers[0], f.tiers[1], f.tiers[2], f.tiers[3]
	c.Guess(depth)
	f.view.reach(c)
	return f.wait + f.view.outlook.prefill + f.view.loadTime()
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
		v.setOutlook(c)
		dst = append(dst, v.outlook.prefill+v.decodeSlowdown(c)+v.laterDelay()+v.evictCost(c))
	}
	return dst
}
