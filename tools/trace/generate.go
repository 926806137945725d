package trace

import "math/rand/v2"

// Options configures [Generate]. The zero value gives the number of requests and the rate of Mooncake's conversation
// trace.
type Options struct {
	// Seed identifies the trace. Every number is valid.
	Seed uint64

	// Requests is how many there are. Default 12,031.
	Requests int

	// Clump is the mean number of requests in three seconds. The default is 10, as in the real trace. Users continue after
	// minutes, so a short trace has follow-ups only with few users: 1 is right for some hundreds of requests.
	Clump int
}

const (
	defaultRequests = 12031
	defaultClump    = 10

	tick      = 3000   // ms between two clumps
	maxPrompt = 126195 // tokens of the longest prompt in the real trace; a conversation ends before a longer prompt
)

// quantiles is a distribution of integers: share[i] thousandths of all draws are at most value[i]. Values between two
// entries are equally likely.
type quantiles []struct{ share, value int }

// The distributions of the real trace, measured.
var (
	firstPrompt = quantiles{{0, 891}, {50, 897}, {100, 905}, {150, 943}, {200, 1092}, {300, 1756}, {400, 3914},
		{500, 5264}, {600, 7417},
		{700, 10775}, {800, 15871}, {850, 19453}, {900, 25561}, {950, 38538}, {970, 51792}, {980, 67212}, {990,
			89869}, {995, 111800}, {1000, maxPrompt}}

	answer = quantiles{{0, 1}, {20, 3}, {50, 10}, {100, 24}, {150, 46}, {200, 100}, {250, 156}, {300, 213}, {400, 291},
		{500, 350}, {600, 399}, {700, 447},
		{800, 504}, {850, 543}, {900, 597}, {950, 698}, {980, 893}, {990, 1120}, {995, 1570}, {999, 2000}, {1000, 2000}}

	// by the user, tokens
	addition = quantiles{{0, 1}, {250, 9}, {500, 26}, {750, 356}, {900, 4203}, {950, 6922}, {990, 16705}, {999, 38787},
		{1000, 91467}}

	// requests in three seconds, if Clump is 10
	clump = quantiles{{0, 0}, {100, 0}, {250, 5}, {500, 10}, {750, 15}, {900, 21}, {950, 24}, {990, 29}, {1000, 43}}

	pause = quantiles{{0, 0}, {20, 17999}, {50, 27001}, {100, 39001}, {200, 57000}, {300, 74999}, {400, 95999},
		{500, 123000}, {600, 162000}, {700, 225001},
		// ms from a request to the follow-up
		{800, 318001}, {900, 474001}, {950, 606000}, {990, 1458000}, {999, 2678999}, {1000, 3030000}}

	// thousandths of the blocks that an edit keeps
	kept = quantiles{{0, 10}, {100, 68}, {200, 97}, {300, 129}, {400, 167}, {500, 214}, {600, 290}, {700, 400},
		{800, 524}, {900, 833}, {1000, 986}}
)

// goesOn has the thousandths of users that continue after the first, second … answer. The last entry is for all later
// answers.
var goesOn = [...]int{380, 490, 580, 650}

// edits is how many of a thousand follow-ups go another way from an earlier point.
const edits = 150

type generator struct {
	rng   *rand.PCG
	fresh uint64 // the next unused id
	due   map[int][]followUp
}

// followUp is a future request of a user.
type followUp struct {
	previous Request
	turn     int // number of earlier answers
	edit     bool
}

// Generate makes a trace. Equal options give equal traces.
func Generate(o Options) []Request {
	if o.Requests <= 0 {
		o.Requests = defaultRequests
	}
	if o.Clump <= 0 {
		o.Clump = defaultClump
	}
	g := &generator{rng: rand.NewPCG(o.Seed, 0x6b7661746c6173), fresh: 1, due: map[int][]followUp{}}
	reqs := make([]Request, 0, o.Requests)
	var waiting []followUp // due, earliest first
	for now := 0; len(reqs) < o.Requests; now++ {
		waiting = append(waiting, g.due[now]...)
		delete(g.due, now)
		for n := (g.draw(clump)*o.Clump + g.below(10)) / 10; n > 0 && len(reqs) < o.Requests; n-- {
			var r Request
			turn := 1
			if len(waiting) > 0 {
				r, turn = g.next(waiting[0].previous, waiting[0].edit), waiting[0].turn+1
				waiting = waiting[1:]
			} else {
				r = g.request([]uint64{0}, g.draw(firstPrompt))
			}
			r.Timestamp = int64(now) * tick
			reqs = append(reqs, r)
			g.plan(now, r, turn)
		}
	}
	return reqs
}

// plan decides whether, when and how the user goes on.
func (g *generator) plan(now int, r Request, turn int) {
	goes := g.below(1000) < goesOn[min(turn, len(goesOn))-1]
	at := now + max(1, (g.draw(pause)+tick/2)/tick)
	edit := g.below(1000) < edits
	if goes && (edit || r.InputLength+r.OutputLength < maxPrompt) {
		g.due[at] = append(g.due[at], followUp{r, turn, edit})
	}
}

// next makes a follow-up of a request: an edit with the same length and other contents after some blocks, or the
// request with the answer and more.
func (g *generator) next(previous Request, edit bool) Request {
	length := min(maxPrompt, previous.InputLength+previous.OutputLength+g.draw(addition))
	same := previous.InputLength / BlockTokens // the last block, if not full, goes on in another way
	if edit {
		length = previous.InputLength
		same = max(min(2, same), same*g.draw(kept)/1000)
	}
	return g.request(previous.HashIDs[:same], length)
}

// request makes a prompt of the given length that begins with the given blocks.
func (g *generator) request(begin []uint64, length int) Request {
	ids := make([]uint64, (length+BlockTokens-1)/BlockTokens)
	for i := copy(ids, begin); i < len(ids); i++ {
		ids[i] = g.fresh
		g.fresh++
	}
	return Request{InputLength: length, OutputLength: g.draw(answer), HashIDs: ids}
}

func (g *generator) below(n int) int { return int(below(g.rng.Uint64(), uint64(n))) }

func (g *generator) draw(q quantiles) int {
	const fine = 1000 // points per thousandth
	u := g.below(1000 * fine)
	i := 1
	for u >= q[i].share*fine {
		i++
	}
	a, b := q[i-1], q[i]
	return a.value + int(int64(b.value-a.value)*int64(u-a.share*fine)/int64((b.share-a.share)*fine))
}
