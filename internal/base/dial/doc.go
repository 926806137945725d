// Package dial connects to addresses that clients, leases and registrations name, and to no other place:
//
//	rule, err := dial.NewRule(dial.Default())                       // --dial-allow
//	conn, err := dial.Dialer{Rule: rule}.DialContext(ctx, "tcp", "engine-1:5557")
//	client := dial.Client(rule, 5*time.Second)                      // HTTP without redirects and proxies
//
// A [Rule] checks the resolved IP address at the moment of the connect call. Names, DNS rebinding, redirects, unusual
// forms of an address and IPv4 addresses within IPv6 addresses cannot bypass the check. Some addresses are forbidden
// under every rule: see [Never]. A nil rule permits every address: it is for addresses that the operator configured.
//
// Errors of a dialled server end in answers to clients. [Fixed] replaces the text of an error, which may contain the
// server's words, with one of a few fixed texts.
//
// [SplitHostPort], [CheckHost], [CheckServing] and [ParseAddresses] parse addresses. All functions are safe for
// concurrent use.
package dial
