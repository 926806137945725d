// Package dial connects to addresses that clients, leases and registrations name, and to no other place:
//
//	rule, err := dial.NewRule(dial.Default())                       // --dial-allow
//	conn, err := dial.Dialer{Rule: rule}.DialContext(ctx, "tcp", "engine-1:5557")
//	client := dial.Client(rule, 5*time.Second)                      // HTTP without redirects and proxies
//
// A [Rule] judges the resolved IP address at the moment of the connect call. Names, DNS rebinding, redirects, unusual
// spellings of an address and IPv4 addresses within IPv6 ones cannot bypass it. Some addresses are refused whatever the
// rule permits: see [Never]. A nil rule permits every address: it is for addresses that the operator configured.
//
// Errors of a dialled server end in answers to clients. [Fixed] replaces their text, which may repeat the server's
// words, by one of a few fixed texts.
//
// [SplitHostPort], [CheckHost], [CheckServing] and [ParseAddresses] read addresses as text. All functions may be called
// by any goroutine.
package dial
