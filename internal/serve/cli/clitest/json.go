package clitest

import (
	"slices"
	"testing"

	"github.com/spf13/cobra"
)

// JSON checks that every command has --json and a form of the output for the reference, except the commands in without
// and cobra's own commands.
func JSON(t *testing.T, root func() *cobra.Command, without ...string) {
	t.Helper()
	walk(root(), func(cmd *cobra.Command) {
		flag := cmd.Flags().Lookup("json")
		switch {
		case cmd.Hidden || cmd.HasSubCommands() && flag == nil:
			return // an old name, or a group
		case slices.Contains(without, cmd.CommandPath()):
			if flag != nil {
				t.Errorf("%s has --json", cmd.CommandPath())
			}
		case flag == nil || flag.Hidden:
			t.Errorf("%s has no --json", cmd.CommandPath())
		case cmd.Annotations["kvatlas_json"] == "":
			t.Errorf("the reference has no form of the output of %s --json", cmd.CommandPath())
		}
	})
}
