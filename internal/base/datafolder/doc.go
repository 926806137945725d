// Package datafolder opens the folder in which a process keeps its data, so that other users of the host cannot make
// the process write somewhere else.
//
//	err := datafolder.Make("kvatlas-data", "jetstream")
//	f, err := datafolder.Open("kvatlas-data", "kvatlas.lock")
//
// The folder and what kvatlas writes in it may not be symbolic links. The folder must belong to the user of the process
// or to root. Its group is trusted: Kubernetes gives volumes to root and lets the group fsGroup write. A folder that
// all users may write is refused, with two exceptions:
//
//   - A folder with the sticky bit, as /tmp: other users cannot rename what is not theirs.
//   - A mount point that belongs to root, as an emptyDir volume of Kubernetes: only the containers of the pod see it.
//
// In both, files of other users and files with several names are refused.
//
// Folders above the data folder are not checked: whoever may rename them can replace the data.
//
// All functions may be called from any goroutine.
package datafolder
