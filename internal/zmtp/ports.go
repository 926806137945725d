package zmtp

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// PortsAfter is an endpoint whose port is so many after another's: engines number the ports of their data-parallel
// ranks so. Of an empty endpoint it is empty.
func PortsAfter(endpoint string, by uint32) (string, error) {
	if by == 0 || endpoint == "" {
		return endpoint, nil
	}
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("several ranks need tcp:// endpoints: %s has no port to count from", endpoint)
	}
	host, text, err := net.SplitHostPort(rest)
	if err != nil {
		return "", err
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil || port+uint64(by) > 65535 {
		return "", fmt.Errorf("%s: there is no port %s + %d", endpoint, text, by)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.FormatUint(port+uint64(by), 10)), nil
}
