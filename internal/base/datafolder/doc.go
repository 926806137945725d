// Package datafolder opens the data folder of a process, and makes sure that other users of the host cannot divert the
// writes of the process.
//
//	err := datafolder.Make("kvatlas-data", "jetstream")
//	f, err := datafolder.Open("kvatlas-data", "kvatlas.lock")
//
// Neither the folder nor the files of kvatlas in it may be symbolic links. The folder must belong to the user of the
// process or to root. The package trusts the group of the folder: Kubernetes gives volumes to root and lets the group
// fsGroup write. A folder with a write permission for all users is rejected, with two exceptions:
//
//   - A folder with the sticky bit, such as /tmp: other users cannot rename the files of this user.
//   - A mount point of root, such as an emptyDir volume of Kubernetes: only the containers of the pod have access.
//
// In these folders, files of other users and files with several names are rejected.
//
// The package does not check the folders above the data folder: a user with the right to rename a folder there can
// replace the data.
//
// All functions are safe for concurrent use.
package datafolder
