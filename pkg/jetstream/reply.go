package jetstream

import "strings"

// InboxRoot begins the first token of all reply subjects of clients.
const InboxRoot = "_INBOX"

// Reserved prefixes of reply subjects. nats-server refuses them in requests of clients (server/client.go,
// isReservedReply), so a request with such a subject has come through the server from another account or cluster.
const (
	responses     = "_R_."  // of requests from another account; a token follows
	gatewayReply  = "_GR_." // of requests from another cluster: two tokens and the client's subject follow
	gatewayBefore = "$GR."  // the same, of old servers, with one token
)

// ReplyAllowed reports whether a service may publish on the reply subject of a request. NATS checks the rights of the
// replying program instead of the requester. A request could therefore name a subject of the log, of a bucket or of
// JetStream. Allowed are inboxes and the server's reply subjects for requests of other accounts.
func ReplyAllowed(subject string) bool {
	if rest, is := strings.CutPrefix(subject, gatewayReply); is {
		_, rest, _ = strings.Cut(rest, ".")
		_, subject, _ = strings.Cut(rest, ".")
	} else if rest, is := strings.CutPrefix(subject, gatewayBefore); is {
		_, subject, _ = strings.Cut(rest, ".")
	}
	return strings.HasPrefix(subject, InboxRoot) || strings.HasPrefix(subject, responses)
}

// MayForward reports whether another node may answer the request; see [Conn.Forward]. The receiving node answers
// requests from another cluster: permissions deny their reply subjects to other nodes.
func (r *Request) MayForward() bool {
	return r.Reply != "" && !strings.HasPrefix(r.Reply, gatewayReply) && !strings.HasPrefix(r.Reply, gatewayBefore)
}

// crossesAccounts reports whether a request with this reply subject came from another account or cluster. nats-server
// refuses a client's request with such a subject; from 2.15.3 on also with every subject below $JS.
func crossesAccounts(reply string) bool {
	for _, reserved := range []string{responses, gatewayReply, gatewayBefore, "$JS."} {
		if strings.HasPrefix(reply, reserved) {
			return true
		}
	}
	return false
}

// answerID reports whether a text may be the id of a request to shims: 8 to 64 letters and digits.
func answerID(id string) bool {
	return len(id) >= 8 && len(id) <= 64 && !strings.ContainsFunc(id, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9')
	})
}
