//! Folders of weights that commands write: found to be possible before the work, and complete or absent after it.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

use narrows_plan::model::Model;
use narrows_runtime::interchange::{WeightFormat, WeightsError, write_weights};
use narrows_runtime::session::ModelTensors;
use narrows_runtime::{AtomicFolder, link_target};

use crate::errors::{CommandResult, ExitStatus, Failure, Problem};
use crate::output::{self, require_folder_name, write_atomically, write_failure};
use crate::signals::EndingSignals;

/// The output of a command that reads and computes weights before it writes them.
pub struct WeightsOutput {
    /// The new folder, behind all links.
    target: PathBuf,
    signals: EndingSignals,
    /// The sentence about a command that a signal ends.
    stopped: String,
}

/// A folder of weights that appears under its name when all of its files are written, and not at all where one cannot be.
pub struct WeightsFolder(AtomicFolder);

impl WeightsOutput {
    /// The folder of `--output`, which is new or empty. From here on, signals end the command, and nothing is left of it.
    ///
    /// # Errors
    /// An output that exists, unless it is an empty folder that can be replaced, one that names no folder, and one that cannot be
    /// written into.
    pub fn prepare(path: &Path) -> CommandResult<WeightsOutput> {
        let stopped = format!("Stopped by a signal: nothing was written to {}\n", path.display());
        let text = stopped.clone();
        let signals = EndingSignals::install("a signal will leave a temporary folder", text);
        let target = target_of(path)?;
        let output = WeightsOutput { target, signals, stopped };
        let signals = &output.signals;
        let created = signals.in_order(|| AtomicFolder::create(&output.target).map(drop));
        if signals.requests().are_pending() {
            return Err(output.stopped());
        }
        created.map_err(|error| unwritable(&output.target, &error))?;
        Ok(output)
    }

    /// Writes the folder, whose parents are created: it has its name once `write` has written all of its files. After a failure,
    /// and after a signal meanwhile, nothing is left of it.
    ///
    /// # Errors
    /// A folder that cannot be written into, those of `write`, a name that is in use by now, and the signal.
    pub fn write<T>(
        &self,
        write: impl FnOnce(&WeightsFolder) -> CommandResult<T>,
    ) -> CommandResult<T> {
        let target = &self.target;
        let failed = |error: io::Error| unwritable(target, &error);
        self.signals.in_order(|| {
            let folder = WeightsFolder(AtomicFolder::create(target).map_err(failed)?);
            let written = write(&folder)?;
            if self.signals.requests().are_pending() {
                return Err(self.stopped());
            }
            folder.0.finish().map_err(|error| match error.kind() {
                io::ErrorKind::DirectoryNotEmpty
                | io::ErrorKind::NotADirectory
                | io::ErrorKind::ResourceBusy => refused(target, "is in use by now"),
                _ => unwritable(target, &error),
            })?;
            Ok(written)
        })
    }

    /// The failure of a command that a signal asks to end.
    fn stopped(&self) -> Failure {
        output::eprint(&self.stopped);
        let stopped = Failure { status: ExitStatus::Stopped, problems: vec![] };
        self.signals.requests().fault().unwrap_or(stopped)
    }
}

impl WeightsFolder {
    /// Writes the weights of a model. Returns the path that they have in the end.
    ///
    /// # Errors
    /// A model for which the format has no names, and files that cannot be written.
    pub fn write_weights(
        &self,
        model: &Model,
        weights: &ModelTensors,
        format: WeightFormat,
    ) -> CommandResult<PathBuf> {
        match write_weights(self.0.path(), model, weights, format) {
            Ok(written) => Ok(self.0.final_path(&written)),
            Err(error) => {
                let path = self.0.final_path(&error.path);
                Err(Failure::weights(WeightsError { path, ..error }))
            }
        }
    }

    /// Writes a file beside the weights. Returns the path that it has in the end.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write_file(&self, name: &str, contents: impl AsRef<[u8]>) -> CommandResult<PathBuf> {
        let file = self.0.path().join(name);
        let path = self.0.final_path(&file);
        write_atomically(&file, contents.as_ref()).map_err(|error| unwritable(&path, &error))?;
        Ok(path)
    }
}

/// The folder that an output names, behind all links. It does not exist, or is empty and can be replaced.
fn target_of(path: &Path) -> CommandResult<PathBuf> {
    require_folder_name("--output", path)?;
    // Without a separator at the end, with which a link would be its folder.
    let target = link_target(&path.components().collect::<PathBuf>());
    let is_occupied = match target.read_dir() {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) if target.is_symlink() => return Err(refused(path, "is a link that leads nowhere")),
        Err(_) => target.exists(),
    };
    if is_occupied {
        return Err(refused(path, "exists and is not an empty folder"));
    }
    let Ok(existing) = fs::canonicalize(&target) else {
        return match target.file_name() {
            Some(_) => Ok(target),
            None => Err(refused(path, "does not name a new folder")),
        };
    };
    let working = env::current_dir().and_then(fs::canonicalize);
    if working.is_ok_and(|working| working == existing) {
        return Err(refused(path, "is the working folder, which cannot be replaced"));
    }
    if is_mount_point(&existing) {
        return Err(refused(path, "is a mount point, which cannot be replaced"));
    }
    Ok(if target.file_name().is_some() { target } else { existing })
}

/// Whether another file system than that of its parent is in a folder.
#[cfg(unix)]
fn is_mount_point(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |folder: &Path| folder.metadata().map(|metadata| metadata.dev()).ok();
    folder.parent().is_some_and(|parent| device(parent) != device(folder))
}

#[cfg(not(unix))]
fn is_mount_point(_folder: &Path) -> bool {
    false
}

fn refused(path: &Path, problem: &str) -> Failure {
    let problem = Problem::new("--output", format!("`{}` {problem}", path.display()));
    Failure::input(problem.hint("a new folder"))
}

fn unwritable(path: &Path, error: &io::Error) -> Failure {
    write_failure(&path.display().to_string(), error)
}

#[cfg(all(test, unix))]
mod tests {
    use signal_hook::consts::signal::SIGTERM;
    use signal_hook::low_level::raise;

    use super::*;

    /// A signal while the files are written leaves neither the folder nor a temporary one, nor a new parent. The other outputs are
    /// in the same test, since a signal is one to the whole process.
    #[test]
    fn a_folder_is_complete_or_absent() {
        let parent = tempfile::tempdir().expect("a folder");
        let names = || parent.path().read_dir().expect("a folder").count();
        let path = parent.path().join("new/parent/weights");
        let result = WeightsOutput::prepare(&path).expect("a new folder").write(|folder| {
            folder.write_file("config.json", "{}")?;
            raise(SIGTERM).expect("a signal");
            folder.write_file("model.json", "{}")
        });
        assert_eq!(result.expect_err("a signal").status, ExitStatus::Stopped);
        assert_eq!(names(), 0);
        let output = WeightsOutput::prepare(&path).expect("a new folder");
        let written = output.write(|folder| folder.write_file("config.json", "{}"));
        assert!(written.expect("no signal").is_file());
        let taken = parent.path().join("taken");
        let output = WeightsOutput::prepare(&taken).expect("a new folder");
        let result = output.write(|_| {
            fs::create_dir(&taken)
                .and_then(|()| fs::write(taken.join("file"), ""))
                .expect("a file");
            Ok(())
        });
        let failure = result.expect_err("a folder with contents");
        assert_eq!(failure.status, ExitStatus::BadInput);
        assert!(failure.to_string().contains("is in use by now"), "{failure}");
        assert_eq!(names(), 2);
    }
}
