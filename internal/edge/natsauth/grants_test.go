package natsauth

import (
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write pkg/jetstream/testdata/accounts.conf")

// TestAccountsOfTheLog compares the configuration of the permission test of pkg/jetstream with the grants. An
// administrator with all permissions joins the users.
func TestAccountsOfTheLog(t *testing.T) {
	t.Parallel()
	shim, err := ShimGrant("test", 1, "w1")
	if err != nil {
		t.Fatal(err)
	}
	admin := Grant{Role: RoleNode, User: "admin", Inbox: "_INBOX", Publish: []string{">"}, Subscribe: []string{">"}}
	var users []User
	for _, g := range []Grant{admin, shim, NodeGrant("test"), ReaderGrant("test")} {
		users = append(users, User{Grant: g, Password: "x"})
	}
	const path = "../../../pkg/jetstream/testdata/accounts.conf"
	config := accountsConfig(arrange("test", users))
	if *update {
		if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if config != string(want) {
		t.Errorf("%s differs from the grants; -update writes it:\n%s", path, config)
	}
}
